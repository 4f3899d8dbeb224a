"""Run by the Python under test, in an empty folder: installed.py COMMANDS, a JSON list of argument lists of `megatron-rl`.

Prints the exit code, standard output and standard error of each as JSON. One process for all: a module that is missing is
missing for every command.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback


def outcome(arguments: list[str]) -> tuple[int, str, str]:
    from megatron_rl.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    found = [outcome(arguments) for arguments in json.loads(sys.argv[1])]
    import megatron_rl

    print(json.dumps({"package": megatron_rl.__file__, "torch": "torch" in sys.modules, "outcomes": found}))
