"""Programs in processes that have imported torch already, which takes each one two seconds otherwise.

`run` starts this file as a process that imports torch, and nothing else, and then forks for each program. A
fork that crashes ends no other one. Not for programs that measure memory, are Python with other options, or
need to set what torch reads at its import.
"""

import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*arguments, cwd, env=None, timeout=300):
    """What `python *arguments` does: -c and a program, or a file.

    A list of environments gives a list of results, of as many processes at the same time.
    """
    server, environments = start(), env if isinstance(env, list) else [env or os.environ]
    with tempfile.TemporaryDirectory() as folder:
        files = [[f"{folder}/{name}{i}" for name in ("out", "err")] for i in range(len(environments))]
        job = {"arguments": [*map(str, arguments)], "cwd": str(cwd)}
        forks = [*zip(files, map(dict, environments), strict=True)]
        server.stdin.write(json.dumps(job | {"forks": forks}) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            start.cache_clear()
            os.killpg(server.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(job["arguments"], timeout)
        statuses = json.loads(server.stdout.readline())
        texts = [[Path(file).read_text() for file in pair] for pair in files]
    found = [
        subprocess.CompletedProcess(job["arguments"], status, *text)
        for status, text in zip(statuses, texts, strict=True)
    ]
    return found if isinstance(env, list) else found[0]


@functools.cache
def start():
    """Ends when this process does, which closes its input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, __file__], start_new_session=True, **pipes)


def serve():
    """Forks for each job, and tells the status of each fork. Returns the arguments in a fork."""
    for line in iter(sys.stdin.readline, ""):
        job, forks = json.loads(line), []
        for files, environment in job["forks"]:
            forks.append(os.fork())
            if forks[-1] == 0:
                for descriptor, file in enumerate((os.devnull, *files)):
                    os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), descriptor)
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(job["cwd"])
                return job["arguments"]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]), flush=True)
    sys.exit()


if __name__ == "__main__":
    import torch  # noqa: F401

    first, *rest = serve()
    if first == "-c":
        program, *rest = rest
        sys.argv[:], sys.path[0] = ["-c", *rest], ""
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:], sys.path[0] = [first, *rest], str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")
