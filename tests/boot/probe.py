#!/usr/bin/env python3
"""Tries what a process under the shipped unit can do, in place of the daemon, and prints one JSON object.

Each entry is the result of an attempt: "ok", or the name of the error.
"""

import ctypes
import errno
import json
import mmap
import os
import socket


def tried(attempt):
    try:
        attempt()
        return "ok"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


def write(path):
    def attempt():
        with open(path, "w"):
            pass
        os.remove(path)
    return attempt


def device(path):
    return lambda: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def call(name, *arguments):
    def attempt():
        libc = ctypes.CDLL(None, use_errno=True)
        if getattr(libc, name)(*arguments) == -1:
            raise OSError(ctypes.get_errno(), name)
    return attempt


def executable():
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)


CLONE_NEWUSER, PTRACE_TRACEME = 0x10000000, 0
ATTEMPTS = {
    "inet": lambda: socket.socket(socket.AF_INET),
    "inet6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "write own state": write("/var/lib/rocmforge/x"),
    "write own cache": write("/var/cache/rocmforge/x"),
    "write private tmp": write("/tmp/x"),
    **{f"write {place}": write(f"{place}/x") for place in
       ["/usr", "/etc", "/etc/rocmforge", "/opt", "/var", "/boot", "/run", "/srv", "/sys/kernel", "/proc/sys/kernel", "/dev"]},
    "list home": lambda: os.listdir("/home/alice"),
    "list root": lambda: os.listdir("/root"),
    "see init": lambda: os.stat("/proc/1"),
    "zero": device("/dev/zero"),
    **{f"device {path}": device(path) for path in ["/dev/net/tun", "/dev/kmsg", "/dev/fuse", "/dev/loop-control", "/dev/mem"]},
    "make a device": lambda: os.mknod("/var/lib/rocmforge/n", 0o20600, os.makedev(1, 1)),
    "executable memory": executable,
    "namespace": call("unshare", CLONE_NEWUSER),
    "become root": lambda: os.setuid(0),
    "real-time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "mount": call("mount", b"none", b"/var/lib/rocmforge", b"tmpfs", 0, None),
    "set-user-id file": lambda: os.chmod(os.open("/var/lib/rocmforge", os.O_RDONLY), 0o6750),
    "reboot": call("reboot", 0),
    "key ring": call("syscall", 248, b"user", b"x", b"y", 1, -1),
    "bpf": call("syscall", 321, 0, None, 0),
}

print(json.dumps({name: tried(attempt) for name, attempt in ATTEMPTS.items()}))
