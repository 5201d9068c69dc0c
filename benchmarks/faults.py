"""Bad input and sudden ends: what the package makes of some hundred broken flags, files and folders, and of kills.

    python benchmarks/faults.py --json results/faults.json          # all, about half an hour
    python benchmarks/faults.py --only images npz --list            # some groups, each case with its message

Each case runs in a process of its own, in an empty folder, and ends in one of these ways:

    refused     exit code 2, one message that names the file, flag or value at fault, nothing left behind
    read right  the input is unusual but valid, and what came of it is what it should be
    ----------- what must not happen:
    traceback, died (by a signal), hung (longer than its time), executed (code from a file ran), accepted (and should
    not have been), misread (accepted, and understood wrongly), unclear (refused without naming what is wrong), left
    behind (a refused command wrote something), lost (a killed run that cannot be continued, or not to the bit)
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bad_input.case import CANARY, Case, speak_into

GOOD = ("refused", "read right")
MEMORY = 8 << 30  # bytes of address space that a case may take


@dataclass
class Outcome:
    case: Case
    kind: str
    message: str = ""
    seconds: float = 0.0


def run(case: Case) -> Outcome:
    """In a child of this process, which has everything imported."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case.prepare(folder)
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(case, folder)
        status = _wait(child, begun + case.seconds)
        outcome = _judge(case, folder, status)
        outcome.seconds = time.monotonic() - begun
        for path in folder.rglob("*"):  # folders without rights cannot be removed
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)
        return outcome


def _child(case: Case, folder: Path) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        speak_into(folder / ".stdout", folder / ".stderr")
        sys.path.insert(0, str(folder))
        code = _call(case.run)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(what: list[str] | Callable[[], Any]) -> int:
    from shortrun.cli import CHECKED_ERRORS, main

    try:
        if callable(what):
            what()
        else:
            main(what)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except CHECKED_ERRORS as error:  # what the Python interface raises
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _wait(child: int, until: float) -> int | None:
    """Its status, or None if it had to be ended."""
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _judge(case: Case, folder: Path, status: int | None) -> Outcome:
    said = (folder / ".stderr").read_text(errors="replace")
    # a framed message of the command line parser, or a line of our own
    message = re.sub(r"[│╭╮╰╯─\s]+", " ", said).strip()
    if list(folder.rglob(CANARY)):
        return Outcome(case, "executed", message)
    if status is None:
        return Outcome(case, "hung", message)
    if os.WIFSIGNALED(status):
        return Outcome(case, "died", f"signal {os.WTERMSIG(status)}: {message}")
    code = os.WEXITSTATUS(status)
    if "Traceback (most recent call last)" in said or code not in (0, 2):
        return Outcome(case, "traceback", message)
    if code == 0:
        if case.works is None:
            return Outcome(case, "accepted", message)
        here = Path.cwd()
        problem = case.works(folder)  # which may go there
        os.chdir(here)
        return Outcome(case, "read right" if problem is None else "misread", problem or "")
    left = [name for name in case.new if (folder / name).exists()]
    if left:
        return Outcome(case, "left behind", f"{', '.join(left)}: {message}")
    if not message or (case.names and not any(word.lower() in message.lower() for word in case.names)):
        return Outcome(case, "unclear", message)
    return Outcome(case, "refused", message)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="groups of cases; kills are one of them")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each group, evenly chosen")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--list", action="store_true", help="print each case, not only what must not happen")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args(argv)

    import torch
    from bad_input import all_cases, kills

    import shortrun.cli  # noqa: F401  (children have it)

    torch.set_num_threads(1)
    wanted = [case for case in all_cases() if words.only is None or case.group in words.only]
    step = max(1, round(1 / words.share))
    chosen = [case for group in _groups(wanted).values() for case in group[::step]]
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    for case in chosen:
        outcome = run(case)
        outcomes.append(outcome)
        if words.list or outcome.kind not in GOOD:
            print(f"{outcome.kind:11} {case.group}: {case.name}  [{outcome.seconds:.1f} s]", flush=True)
            print(f"    {outcome.message[-400:]}", flush=True)
    result: dict[str, Any] = {"cases": len(outcomes), "seconds": round(time.monotonic() - begun)}
    result["outcomes"] = dict(collections.Counter(outcome.kind for outcome in outcomes))
    result["groups"] = {
        name: dict(collections.Counter(o.kind for o in outcomes if o.case.group == name)) for name in _groups(chosen)
    }
    if words.kills and (words.only is None or "kills" in words.only):
        result["kills"] = kills(words.kills)
    print(json.dumps(result, indent=1))
    if words.json:
        words.json.write_text(json.dumps(result, indent=1) + "\n")
    bad = sum(outcome.kind not in GOOD for outcome in outcomes) + result.get("kills", {}).get("lost", 0)
    if bad:
        raise SystemExit(1)


def _groups(cases: Sequence[Case]) -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    return found


if __name__ == "__main__":
    main()
