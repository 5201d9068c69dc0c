"""Many users at once on the studio's page: how long they wait, what fails, how much memory it takes.

    python benchmarks/studio.py --users 20 --seconds 60 --json results/studio.json

The page is served by a process of its own, on loopback. First each action is timed alone, best of three; then all users
press random buttons for a while, with a pause of two to six seconds after each answer, through the queue that browsers
use. Times are those of whole answers, the time in the queue included.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from shortrun.studies.sources import machine
from shortrun.studio.shared import Studio
from shortrun.studio.sources import open_source
from shortrun.studio.work import ROW

ACTIONS = ("fill", "run-chain", "resample", "samples", "interpolate")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["faces-small", "mnist-small", "svhn-small"])
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, nargs=2, default=(2.0, 6.0))
    parser.add_argument("--json", type=Path)
    words = parser.parse_args(argv)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "shortrun", "studio", *words.models, "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        config = _wait(url, server)
        studio = Studio([open_source(name) for name in words.models])
        warm_until(url, config, studio)
        alone = {
            name: {action: min(answer(url, config, studio, name, action, seed)[0] for seed in range(3))
                   for action in ACTIONS}
            for name in studio.sources
        }  # fmt: skip
        for name, times in alone.items():
            print(f"{name:14}" + "  ".join(f"{action} {seconds:.2f} s" for action, seconds in times.items()))
        before = memory(server)
        found = crowd(url, config, studio, words.users, words.seconds, words.pause)
        result: dict[str, Any] = {
            "command": f"python benchmarks/studio.py --users {words.users} --seconds {words.seconds:g}",
            "machine": machine(), "batch": ROW, "seconds_alone": alone, "users": words.users, "seconds": words.seconds,
            **found, "memory_mb_before": before, "memory_mb_after": memory(server),
        }  # fmt: skip
    finally:
        server.terminate()
        server.wait(20)
    print(json.dumps({key: value for key, value in result.items() if key != "seconds_alone"}, indent=1))
    if words.json is not None:
        words.json.parent.mkdir(parents=True, exist_ok=True)
        words.json.write_text(json.dumps(result, indent=1) + "\n")


def _wait(url: str, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    for _ in range(240):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode}")
        try:
            return dict(httpx.get(f"{url}/config", timeout=5).json())
        except httpx.HTTPError:
            time.sleep(0.5)
    raise RuntimeError("the server did not start within two minutes")


def memory(server: subprocess.Popen[bytes]) -> float:
    return round(psutil.Process(server.pid).memory_info().rss / 2**20, 1)


def warm_until(url: str, config: dict[str, Any], studio: Studio) -> None:
    """Until what the server computes at its start is there."""
    for name in studio.sources:
        answer(url, config, studio, name, "fill", 0)
        answer(url, config, studio, name, "curve", 0)


def button(config: dict[str, Any], elem_id: str) -> tuple[int, list[int]]:
    """Number of what a button starts, and of its inputs."""
    component = next(c["id"] for c in config["components"] if c["props"].get("elem_id") == elem_id)
    for number, dependency in enumerate(config["dependencies"]):
        if [component, "click"] in [list(target) for target in dependency["targets"]]:
            return int(dependency.get("id", number)), list(dependency["inputs"])
    raise KeyError(elem_id)


def answer(
    url: str, config: dict[str, Any], studio: Studio, name: str, action: str, seed: int
) -> tuple[float, str | None]:
    """Seconds until an answer is complete, and what went wrong."""
    number, inputs = button(config, action)
    source = studio.source(name)
    chosen = seed % len(source.images)
    x = source.images[chosen : chosen + 1]
    known = {
        "fill": [name, {"chosen": chosen}, None, studio.painter(source, x, "lower-half"), seed],
        "run-chain": [name, {"chosen": chosen}, None, seed, True],
        "resample": [name, {"chosen": chosen}, None, seed, "the chosen image"],
        "interpolate": [name, {"chosen": chosen}, None, (chosen + 1) % len(source.images)],
        "samples": [name, seed],
        "curve": [name],
    }[action]
    assert len(known) == len(inputs), (action, inputs)
    session = uuid.uuid4().hex
    begun = time.perf_counter()
    try:
        with httpx.Client(timeout=120) as client:
            body = {"data": known, "fn_index": number, "session_hash": session, "event_data": None, "trigger_id": None}
            joined = client.post(f"{url}/gradio_api/queue/join", json=body)
            if joined.status_code == 503:
                return time.perf_counter() - begun, "the queue is full"
            joined.raise_for_status()
            with client.stream("GET", f"{url}/gradio_api/queue/data", params={"session_hash": session}) as lines:
                for line in lines.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    message = json.loads(line[5:])
                    if message["msg"] == "process_completed":
                        failed = None if message["success"] else str(message.get("output"))
                        return time.perf_counter() - begun, failed
    except httpx.HTTPError as error:
        return time.perf_counter() - begun, f"{type(error).__name__}: {error}"
    return time.perf_counter() - begun, "no answer"


def crowd(
    url: str, config: dict[str, Any], studio: Studio, users: int, seconds: float, pause: Sequence[float]
) -> dict[str, Any]:
    """Users that press buttons for a while; each waits for its answer first."""
    until = time.perf_counter() + seconds
    times: list[float] = []
    errors: list[str] = []

    def user(number: int) -> None:
        choice = random.Random(number)
        time.sleep(choice.uniform(0, pause[1]))
        while time.perf_counter() < until:
            name, action = choice.choice(list(studio.sources)), choice.choice(ACTIONS)
            took, wrong = answer(url, config, studio, name, action, choice.randrange(1000))
            times.append(took)
            if wrong is not None:
                errors.append(f"{action}: {wrong}"[:200])
            time.sleep(choice.uniform(*pause))

    threads = [threading.Thread(target=user, args=(i,)) for i in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(times) < 2:
        raise RuntimeError("hardly anybody was answered; give more --seconds")
    cuts = statistics.quantiles(times, n=20, method="inclusive")
    return {
        "answers": len(times), "p50": round(statistics.median(times), 2), "p95": round(cuts[18], 2),
        "slowest": round(max(times), 2), "errors": len(errors), "first_errors": errors[:3],
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
