"""Run a program in this process, after it has given up nearly all that a process may do.

    python -I within.py FOLDER DESCRIPTOR SECONDS BYTES MEMORY  <  TOKEN

It is run by `limited.py`, as a file of its own, so it imports the standard library alone. What
cannot be set ends it before the program begins. `DESCRIPTOR` then gets a line, "files" where what
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
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
EPERM, EAGAIN, EACCES, ENOSYS = 1, 11, 13, 38
THREAD = 0x10000  # of clone's flags
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
FIRST_UNKNOWN = 463  # the first number of a call that is newer than this list, on both machines
OF_ITSELF = {"prlimit64": (302, 261)}  # may be called with process 0, itself
FOR_THREADS = {"clone": (56, 220)}
TO_READ = {"openat": (257, 56)}  # asked only where Landlock is not there
REFUSED: dict[int, dict[str, tuple]] = {
    EAGAIN: {"fork": (57, None), "vfork": (58, None)},
    ENOSYS: {"clone3": (435, 435), "openat2": (437, 437)},  # callers go on with the older ones
    EACCES: {"socket": (41, 198), "io_uring_setup": (425, 425)},
    EPERM: {
        "execve": (59, 221), "execveat": (322, 281),
        "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
        "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
        "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "unshare": (272, 97), "setns": (308, 268), "setpriority": (141, 140),
        "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186),
        "semget": (64, 190), "mq_open": (240, 180), "keyctl": (250, 219), "add_key": (248, 217),
        "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
        "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
        "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
        "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
        "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
        "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    },
}  # fmt: skip
CHANGES = {  # of files, by name: refused where Landlock is not there
    "open": (2, None), "creat": (85, None), "truncate": (76, 45), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None),
    "mknodat": (259, 33),
}  # fmt: skip
# Landlock's rights, as its first version has them; later ones add REFER, TRUNCATE and IOCTL
EXECUTE, WRITE, READ_FILE, READ_FOLDER, REMOVE, MAKE = 1, 2, 4, 8, 32, 256
RIGHTS = ((1, 13), (2, 14), (3, 15), (5, 16))  # (version, how many rights it knows)
TRUNCATE = 1 << 14
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    folder, descriptor, seconds, size, memory = sys.argv[1], *map(int, sys.argv[2:6])
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
    checked(libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
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
    """Classic BPF that refuses system calls; without `files` also all that change a file."""
    made = [one(LOAD, 4), one(EQUAL, audit, 1, 0), one(RETURN, REFUSE | ENOSYS), one(LOAD, 0)]
    # newer calls than those below, which may do anything, and x32
    made += [one(AT_LEAST, FIRST_UNKNOWN, 0, 1), one(RETURN, REFUSE | ENOSYS)]
    refused = dict(REFUSED)
    if not files:
        refused[EACCES] = REFUSED[EACCES] | CHANGES
    for error, calls in refused.items():
        for numbers in calls.values():
            if numbers[column] is not None:
                made += [one(EQUAL, numbers[column], 0, 1), one(RETURN, REFUSE | error)]
    # (calls, where an argument stands, its bits, what follows if some are set, and if none is)
    asked: list[tuple] = [(FOR_THREADS, 16, THREAD, ALLOW, REFUSE | EAGAIN)]
    asked += [(OF_ITSELF, 16, 0xFFFFFFFF, REFUSE | EPERM, ALLOW)]
    asked += [] if files else [(TO_READ, 32, WRITING, REFUSE | EACCES, ALLOW)]
    for calls, place, bits, some, none in asked:
        for numbers in calls.values():
            made += [one(EQUAL, numbers[column], 0, 4), one(LOAD, place), one(ANY_BIT, bits, 0, 1)]
            made += [one(RETURN, some), one(RETURN, none)]
    return b"".join([*made, one(RETURN, ALLOW)])


def one(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


if __name__ == "__main__":
    main()
