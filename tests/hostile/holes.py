"""Attacks on the process that grades code, run as a script; prints what became of each as JSON.

With the argument ``unfiltered``, every system call is allowed, so that the namespaces have to stop the attacks alone.
"""

import json
import os
import socket
import struct
import sys
import tempfile
from pathlib import Path

from mas_gym.tasks.grading import sandbox

SECRET = "sk-secret"
CALL = """
import ctypes, os
def call(*arguments):
    result = ctypes.CDLL(None, use_errno=True).syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
ATTACKS = {
    "reads the parent's environment": "open('/proc/PARENT/environ').read()",
    "reads the environment of who started it": "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
    "reads a file of the user": "open('FOLDER/precious').read()",
    "lists the user's files": "import os\nos.listdir('FOLDER')",
    "changes a file of the user": "open('FOLDER/precious', 'w').write('changed')",
    "removes a file of the user": "import os\nos.remove('FOLDER/precious')",
    "writes to the root": "open('/mine', 'w')",
    "writes to Python": "import os\nopen(os.__file__, 'a')",
    "writes to a device folder": "open('/dev/mine', 'w')",
    "owns signals of the parent": (
        "import fcntl, os\nreading, writing = os.pipe()\nfcntl.fcntl(reading, fcntl.F_SETOWN, PARENT)\n"
        "fcntl.fcntl(reading, 10, 9)\nfcntl.fcntl(reading, fcntl.F_SETFL, fcntl.FASYNC)\nos.write(writing, b'x')"
    ),
    "kills the parent": "import os\nos.kill(PARENT, 9)",
    "kills the parent's group": "import os\nos.killpg(PARENT, 9)",
    "slows the parent": "import os\nos.setpriority(os.PRIO_PROCESS, PARENT, 19)",
    "moves the parent to one core": "import os\nos.sched_setaffinity(PARENT, {0})",
    "limits the parent": "import resource\nresource.prlimit(PARENT, resource.RLIMIT_NOFILE, (8, 8))",
    "opens the parent": f"{CALL}call(434, PARENT, 0)",
    "steals the parent's descriptors": f"{CALL}call(438, call(434, PARENT, 0), 1, 0)",
    "attaches to the parent": f"{CALL}call(101 if os.uname().machine == 'x86_64' else 117, 16, PARENT, 0, 0)",
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', PORT), timeout=5)",
    "connects to a local name": "import socket\nsocket.socket(socket.AF_UNIX).connect(chr(0) + 'mas-gym-PARENT')",
    "inherits descriptors": (
        "import os\nfor number in range(3, 64):\n"
        "    try: kind = os.fstat(number).st_mode\n    except OSError: continue\n"
        "    assert kind & 0o170000 == 0o010000, number\nraise OSError('nothing but the pipe of its report')"
    ),
}
ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


def main() -> None:
    """Attack this process and report."""
    os.environ["OPENAI_API_KEY"] = SECRET
    if sys.argv[1:] == ["unfiltered"]:
        sandbox.seccomp_program = lambda: ALLOW_ALL
    before = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        open(os.devnull, "rb") as inherited,
    ):
        os.set_inheritable(inherited.fileno(), True)
        named.bind(f"\0mas-gym-{os.getpid()}")
        named.listen()
        precious = Path(folder, "precious")
        precious.write_text("keep")
        reasons = {}
        for name, code in ATTACKS.items():
            for word, value in (("PARENT", os.getpid()), ("FOLDER", folder), ("PORT", server.getsockname()[1])):
                code = code.replace(word, str(value))
            reasons[name] = sandbox.run_tests(code, "assert 1", sandbox.Limits(seconds=60)).reason
        assert precious.read_text() == "keep"
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)) == before
    print(json.dumps({"user": os.getuid(), "reasons": reasons}))


if __name__ == "__main__":
    main()
