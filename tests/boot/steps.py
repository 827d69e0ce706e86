"""What scenarios in the booted container do: run commands, wait, ask systemd."""

import subprocess
import time


def run(*command, check=True, user=None, timeout=60):
    """Runs a command; as `user`, if given, with that user's groups."""
    if user:
        command = ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *command)
    # The journal exports a message of several lines with its length in binary.
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}: status {done.returncode}: {done.stdout}{done.stderr}")
    return done


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def until(what, condition, seconds):
    """Waits for a condition; returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        expect(time.monotonic() - started < seconds, f"timed out after {seconds} s waiting until {what}")
        time.sleep(0.02)
    return time.monotonic() - started


def shown(unit, key):
    return run("systemctl", "show", "--value", "--property", key, unit).stdout.strip()


def reload(unit):
    """Reloads the daemon's configuration, and waits until it is in force. Before version 253, systemd does not."""
    def times():
        return run("journalctl", "--boot", "--output=cat", f"--unit={unit}").stdout.count("configuration read again")

    before = times()
    run("systemctl", "reload", unit)
    until("the configuration is read again", lambda: times() > before, 5)
