"""Runs a program on its own terminal, sends it a key or a signal, and checks the terminal afterwards.

usage: terminal.py WAIT_FOR ACT PROGRAM...
WAIT_FOR is a text that the program must show first; ACT is key:TEXT, signal:NUMBER or none. Prints the exit status, then the
output after the program left the alternate screen. Fails if the terminal's settings are not restored.
"""

import fcntl, os, pty, select, struct, subprocess, sys, termios, time

LEAVE = b"\x1b[?1049l"
PATIENCE_S = 60


def main(wait_for, act, command):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    before = termios.tcgetattr(slave)
    child = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    shown = b""
    until = time.monotonic() + PATIENCE_S
    acted = False
    while time.monotonic() < until:
        ready, _, _ = select.select([master], [], [], 0.05)
        if ready:
            shown += os.read(master, 65536)
        if not acted and wait_for.encode() in shown:
            acted = True
            raw = termios.tcgetattr(slave)[3] & (termios.ICANON | termios.ECHO)
            assert act == "none" or raw == 0, "the program shows it on a terminal that echoes"
            kind, _, what = act.partition(":")
            if kind == "key":
                os.write(master, what.encode())
            elif kind == "signal":
                child.send_signal(int(what))
        if not ready and child.poll() is not None:
            break
    status = child.poll()
    if status is None:
        child.kill()
        sys.exit(f"the program did not end; it showed {shown!r}")
    assert acted, f"{wait_for} was never shown: {shown!r}"
    assert termios.tcgetattr(slave) == before, "the terminal's settings are not restored"
    assert LEAVE in shown, f"the program did not leave the alternate screen: {shown!r}"
    assert b"\x1b[?25h" in shown, f"the cursor is still hidden: {shown!r}"
    print(status)
    print(shown.split(LEAVE, 1)[1].decode())


main(sys.argv[1], sys.argv[2], sys.argv[3:])
