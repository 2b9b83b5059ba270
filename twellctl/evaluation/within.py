"""Run a program in this process, after it has given up nearly all that a process may do.

    python -I within.py FOLDER JUDGE DESCRIPTOR SECONDS BYTES MEMORY  <  TOKEN

It is run by `limited.py`, as a file of its own, so it imports the standard library alone. Its
process ends with JUDGE, the one that started it. What cannot be set ends it before the program
begins. Of system calls, it keeps those listed here. DESCRIPTOR then gets a line, "files" where what
is read is limited too, else "some"; and the token once the program has come to its end. Who would
forge a token can: this holds programs that do harm, not those that cheat.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import types

# ---- numbers of linux/*.h ----
NO_NEW_PRIVS, PDEATHSIG, SECCOMP, FILTER = 38, 1, 22, 2
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # classic BPF
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
EPERM, ENOSYS = 1, 38
NUMBER, MACHINE, FIRST, SECOND, THIRD = 0, 4, 16, 24, 32  # where a call and its arguments stand
ALL = 0xFFFFFFFF
THREAD = 0x10000  # of clone's flags
UNIX, STREAM, KIND = 1, 1, 0xF  # of sockets
FLAGS = (0, 1, 2, 3, 4, 1030)  # fcntl: copies and flags of a descriptor
LOCKS = (5, 6, 7)
ASKS = (0x5401, 0x5413, 0x541B)  # ioctl: whether it is a terminal, its size, what can be read
SETS = (0x5421, 0x5450, 0x5451)  # whether reading waits; whether it is kept over exec
W, RW, TRUNC = os.O_WRONLY, os.O_RDWR, os.O_TRUNC
TO_READ: tuple = (W | RW | TRUNC | os.O_CREAT, (0,))  # flags of open, and their values
# Landlock's first versions do not see that a file which is opened to be read is emptied
IN_FOLDER: tuple = (W | RW | TRUNC, (0, W, RW, W | TRUNC, RW | TRUNC))
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# What a program may call: the number on x86_64 and on aarch64.
ALLOWED: dict[str, tuple] = {
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "msync": (26, 227), "brk": (12, 214),
    # files that are open
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "fstat": (5, 80), "ftruncate": (77, 46),
    "fsync": (74, 82), "fdatasync": (75, 83), "getdents64": (217, 61), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "fallocate": (285, 47), "fstatfs": (138, 44), "fchdir": (81, 50),
    # names of files: whether they exist, and where they lead
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None),
    "readlinkat": (267, 78), "statfs": (137, 43), "getcwd": (79, 17), "chdir": (80, 49),
    # waiting, and pairs of pipes and sockets
    "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73),
    "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "eventfd2": (290, 19),
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
    "getsockopt": (55, 209), "setsockopt": (54, 208),
    # threads
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "exit": (60, 93),
    "exit_group": (231, 94), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "gettid": (186, 178), "restart_syscall": (219, 128),
    # signals that it gets
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "pause": (34, None), "alarm": (37, None), "getitimer": (36, 102),
    "setitimer": (38, 103),
    # time
    "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "times": (100, 153),
    # itself
    "getpid": (39, 172), "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "umask": (95, 166), "getrandom": (318, 278), "wait4": (61, 260),
    "waitid": (247, 95),
}  # fmt: skip
CHANGES = {  # of files, by name: allowed where Landlock keeps them to the folder
    "creat": (85, None), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "unlink": (87, None), "unlinkat": (263, 35),
}  # fmt: skip
# Allowed if all is so: (numbers, [(where an argument stands, its bits that count, their values)])
ASKED: dict[str, tuple] = {
    "clone": ((56, 220), [(FIRST, THREAD, (THREAD,))]),
    "prlimit64": ((302, 261), [(FIRST, ALL, (0,))]),  # of itself
    "fcntl": ((72, 25), [(SECOND, ALL, FLAGS + LOCKS)]),  # no owner, who would get signals
    "ioctl": ((16, 29), [(SECOND, ALL, ASKS + SETS)]),
    # but for the kinds that can send elsewhere
    "socketpair": ((53, 199), [(FIRST, ALL, (UNIX,)), (SECOND, KIND, (STREAM,))]),
}
OPENS = {"open": ((2, None), SECOND), "openat": ((257, 56), THIRD)}  # and where their flags stand
FIRST_OF_BOTH = 424  # calls from here on have one number; callers know how to do without them
# Landlock's rights, as its first version has them; later ones add REFER, TRUNCATE and IOCTL
EXECUTE, WRITE, READ_FILE, READ_FOLDER, REMOVE, MAKE = 1, 2, 4, 8, 32, 256
RIGHTS = ((1, 13), (2, 14), (3, 15), (5, 16))  # (version, how many rights it knows)
TRUNCATE = 1 << 14
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    folder, judge, descriptor, seconds, size, memory = sys.argv[1], *map(int, sys.argv[2:7])
    checked(libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != judge:
        sys.exit("its judge has ended")
    token = sys.stdin.buffer.read()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the process
    os.dup2(sys.stdin.fileno(), 0)
    source = read(os.path.join(folder, "program.py"))
    try:
        guarded = limit(folder, seconds, size, memory)
    except OSError as error:
        sys.exit(f"a process cannot be limited here ({error})")
    os.write(descriptor, guarded + b"\n")
    run(source, os.path.join(folder, "program.py"))
    os.write(descriptor, token)
    os._exit(0)  # without waiting for its threads


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def run(source: str, path: str) -> None:
    """As `python path` would; what it raises ends the process with its traceback."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"], sys.argv = module, [path]
    exec(compile(source, path, "exec"), module.__dict__)


def limit(folder: str, seconds: int, size: int, memory: int) -> bytes:
    """Set all limits, for good; "files" or "some". `OSError` if one cannot be set."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"its rules are written for {' and '.join(ARCHITECTURES)}, not {machine}")
    limits = {"AS": memory, "CPU": seconds + 1, "FSIZE": size, "NOFILE": 64, "CORE": 0}
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        most = at_most(most, resource.getrlimit(kind)[1])
        resource.setrlimit(kind, (most, most))
    sys.dont_write_bytecode = True
    checked(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header = struct.pack("Ii", 0x20080522, 0)
    checked(libc.capset(header, bytes(24)), "capset")  # root gives up what makes it root
    files = keep_to(folder)
    rules = filter_of(*ARCHITECTURES[machine], files)
    program = ctypes.create_string_buffer(rules, len(rules))
    pointed = struct.pack("HxxxxxxQ", len(rules) // 8, ctypes.addressof(program))
    checked(libc.prctl(SECCOMP, FILTER, pointed, 0, 0), "seccomp")
    return b"files" if files else b"some"


def at_most(wanted: int, hard: int) -> int:
    """`wanted`, or a lower limit that is set already, which only root could raise."""
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def keep_to(folder: str) -> bool:
    """Landlock: read Python's own files, and write files in `folder`. False if it is not there."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    handled = (1 << max(known for since, known in RIGHTS if version >= since)) - 1
    ruleset = checked(libc.syscall(444, struct.pack("Q", handled), 8, 0), "Landlock")
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(os.path.isdir, sys.path)}
    rules = dict.fromkeys([*python, *READABLE], READ_FILE | READ_FOLDER | EXECUTE)
    rules[os.devnull] = READ_FILE | WRITE
    rules[folder] = READ_FILE | READ_FOLDER | WRITE | REMOVE | MAKE | TRUNCATE
    for path, rights in rules.items():
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= ~(READ_FOLDER | REMOVE | MAKE)
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", rights & handled, place)
        checked(libc.syscall(445, ruleset, 1, rule, 0), "Landlock")
        os.close(place)
    checked(libc.syscall(446, ruleset, 0), "Landlock")
    os.close(ruleset)
    return True


def filter_of(audit: int, column: int, files: bool) -> bytes:
    """Classic BPF that allows what is listed; of `CHANGES` and writing only with `files`."""
    made = [one(LOAD, MACHINE), one(EQUAL, audit, 1), one(RETURN, REFUSE | ENOSYS)]
    made.append(one(LOAD, NUMBER))
    for numbers in [*ALLOWED.values(), *(CHANGES.values() if files else ())]:
        if numbers[column] is not None:
            made += [one(EQUAL, numbers[column], 0, 1), one(RETURN, ALLOW)]
    flags = IN_FOLDER if files else TO_READ
    opens = [(numbers, [(place, *flags)]) for numbers, place in OPENS.values()]
    for numbers, conditions in [*ASKED.values(), *opens]:
        if numbers[column] is not None:
            asked = [step for condition in conditions for step in only_if(*condition)]
            asked.append(one(RETURN, ALLOW))
            made += [one(EQUAL, numbers[column], 0, len(asked)), *asked]
    made += [one(AT_LEAST, FIRST_OF_BOTH, 0, 1), one(RETURN, REFUSE | ENOSYS)]  # and x32
    return b"".join([*made, one(RETURN, REFUSE | EPERM)])


def only_if(place: int, bits: int, values: tuple[int, ...]) -> list[bytes]:
    """Refuse the call unless `bits` of the argument at `place` have one of `values`."""
    tests = [one(EQUAL, value, len(values) - i) for i, value in enumerate(values)]
    return [one(LOAD, place), one(AND, bits), *tests, one(RETURN, REFUSE | EPERM)]


def one(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


if __name__ == "__main__":
    main()
