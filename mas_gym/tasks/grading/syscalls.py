"""The allow-list of system calls for code in the sandbox, as a seccomp program for ``bwrap --seccomp``.

It contains the calls that CPython makes for files, memory, time, threads, signals and its own pipes. Other calls fail
with "operation not permitted". Calls newer than the list fail with "function not implemented", so that the C library
falls back to older ones. New processes and sockets are rejected; new threads and local pairs of sockets are allowed.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from typing import NamedTuple

# Each call with its numbers on x86-64 and ARM64 (-: no such call).
_FILES = (
    "read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70, "
    "lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24, fcntl 72 25, flock 73 32, "
    "ioctl 16 29, open 2 -, openat 257 56, creat 85 -, access 21 -, faccessat 269 48, faccessat2 439 439, stat 4 -, "
    "lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, readlink 89 -, "
    "readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, "
    "rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, "
    "linkat 265 37, symlink 88 -, symlinkat 266 36, truncate 76 45, ftruncate 77 46, fallocate 285 47, "
    "fadvise64 221 223, chmod 90 -, fchmod 91 52, fchmodat 268 53, utime 132 -, utimes 235 -, utimensat 280 88, "
    "getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, "
    "fsync 74 82, fdatasync 75 83, umask 95 166, preadv2 327 286, pwritev2 328 287, sendfile 40 71, "
    "copy_file_range 326 285"
)
_WAITING = (
    "pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, "
    "epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, "
    "sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210, "
    "getsockname 51 204, getpeername 52 205, getsockopt 55 209, setsockopt 54 208"
)
_MEMORY = (
    "brk 12 214, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, msync 26 227, "
    "mincore 27 232, mlock 149 228, munlock 150 229"
)
_PROCESS = (
    "execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, getpid 39 172, getppid 110 173, "
    "gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, "
    "getresgid 120 150, getgroups 115 158, getpgid 121 155, getpgrp 111 -, getsid 124 156, kill 62 129, "
    "tgkill 234 131, tkill 200 130, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, "
    "rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, "
    "restart_syscall 219 128, set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, futex 202 98, "
    "membarrier 324 283, sched_yield 24 124, sched_getaffinity 204 123, arch_prctl 158 -, prlimit64 302 261, "
    "getrlimit 97 163, setrlimit 160 164, getrusage 98 165"
)
_TIME = (
    "nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, "
    "time 201 -, times 100 153, alarm 37 -, pause 34 -, getitimer 36 102, setitimer 38 103, sysinfo 99 179, "
    "uname 63 160, getrandom 318 278, getcpu 309 168"
)

_THREAD = 0x10000  # CLONE_THREAD
_LOCAL = 1  # AF_UNIX
_NEW = 424  # From here on, calls have one number on all machines.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16


class _Machine(NamedTuple):
    audit: int
    column: int
    clone: int
    socketpair: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 1, 56, 53), "aarch64": _Machine(0xC00000B7, 2, 220, 199)}


def supported() -> bool:
    """Return whether there is a filter for this machine."""
    return sys.platform == "linux" and sys.maxsize > 1 << 32 and os.uname().machine in _MACHINES


def seccomp_program() -> bytes:
    """Return the filter for this machine, as Berkeley Packet Filter (BPF) instructions."""
    machine = _MACHINES[os.uname().machine]
    columns = (
        call.split()[machine.column] for call in ", ".join((_FILES, _WAITING, _MEMORY, _PROCESS, _TIME)).split(", ")
    )
    allowed = [int(number) for number in columns if number != "-"]
    # An instruction consists of its code, the numbers of instructions to skip if true and if false, and its operand.
    steps = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, machine.audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    end = [
        (_EQUAL, 0, 2, machine.clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 6, 5, _THREAD),
        (_EQUAL, 0, 2, machine.socketpair),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 3, 2, _LOCAL),
        (_AT_LEAST, 0, 1, _NEW),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    to_allow = len(allowed) + len(end) - 1
    steps += [(_EQUAL, to_allow - place - 1, 0, number) for place, number in enumerate(allowed)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, *end])
