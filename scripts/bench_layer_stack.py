"""One rank of eight of GLM-5 at full depth in a real engine: load time, milliseconds a token, where they go.

    python scripts/bench_layer_stack.py --out results [--layers 78] [--keep] [--budget 240]

Writes a GGUF set whose shapes are those of one tensor-parallel rank (58 GB for all 78 layers, random weights), takes
it through `glm5deploy patch`, starts vLLM with the flags that `glm5deploy serve` generates, and measures decode steps
at batch 1, 8 and 32, prefill, and GPU time by kernel. There are no collectives: what they cost comes on top. Sampling
is over an eighth of the vocabulary. Exit status 1 when a measurement failed. Without a GPU, `--layers 4 --scale small
--device cpu --no-profile` tries the course.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from layer_stack import engine as engines
from layer_stack import report
from layer_stack.course import Course
from layer_stack.generate import write_stack
from layer_stack.measure import Wanted
from layer_stack.place import choose_folder, free_port, quick_folder
from layer_stack.session import Session
from layer_stack.stack import LAYERS, Stack

from glm5deploy.config import Config
from glm5deploy.pipeline.events import Event, Events
from glm5deploy.pipeline.runner import Pipeline
from glm5deploy.server.settings import ServeSettings
from glm5deploy.stages.patch import PatchStage


def patch(gguf: Path, workdir: Path, note: Callable[[str], None]) -> Path:
    """What `glm5deploy patch --gguf` does; the model folder."""

    def say(event: Event) -> None:
        if event.message:
            note(f"patch: {event.message}")

    (result,) = Pipeline([PatchStage(gguf)], workdir, Config(), Events(say)).run()
    return Path(str(result.outputs["folder"]))


def make(
    course: Course, folder: Path, stack: Stack, quick: bool, launch: Callable[[Path], engines.Engine]
) -> engines.Engine:
    """Write the file, make its model folder as soon as the headers are there, and start the engine over it.

    ``quick``: the engine starts at once, since it takes long before it loads; RuntimeError if it beat the file.
    """
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as beside:
        folders: list[Future[Path]] = []
        started: list[Future[engines.Engine]] = []

        def headers_done(files: tuple[Path, ...]) -> None:
            if quick:
                started.append(beside.submit(lambda: launch(quick_folder(files[0], folder / "work" / "model"))))
            else:
                folders.append(beside.submit(patch, files[0], folder / "work", course.say))

        try:
            files = write_stack(folder, stack, course.say, headers_done)
        except BaseException:
            for engine in started:
                engine.result().stop()
            raise
        size, seconds = sum(file.stat().st_size for file in files), time.monotonic() - begun
        course.say(f"{len(files)} shards of {size / 1e9:.2f} GB in {folder} after {seconds:.1f} s")
        if not quick:
            return launch(folders[0].result())
        engine = started[0].result()
    if engine.has_begun_to_load():
        engine.stop()
        raise RuntimeError("the engine read the file before it was written; start again without --quick")
    return engine


def settings_for(model: Path, stack: Stack, device: str, traces: Path | None, extra: list[str]) -> ServeSettings:
    flags = ["--no-enable-log-requests", *extra]
    if traces is not None:
        traces.mkdir()
        profiler = {
            "profiler": "torch",
            "torch_profiler_dir": str(traces),
            "torch_profiler_with_stack": False,
            "ignore_frontend": True,
        }
        flags += ["--profiler-config", json.dumps(profiler)]
    return ServeSettings(
        model_folder=model,
        device="cpu" if device == "cpu" else "cuda",
        port=free_port(),
        name="stack",
        context=9216 if stack.scale == "real" else 2048,
        dtype="float32" if device == "cpu" else "bfloat16",
        max_seqs=32,
        extra=tuple(flags),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "layer-stack")))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--scale", choices=("real", "small"), default="real")
    parser.add_argument("--version", choices=("5.2", "5"), default="5.2", help="indexers on 21 layers, or on all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="where the file goes (default: memory if it fits, else /tmp)")
    parser.add_argument("--model", type=Path, help="a model folder that an earlier run with --keep has left")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; what would not end in time is left out")
    parser.add_argument("--quick", action="store_true", help="start the engine while the file is written; no patch")
    parser.add_argument("--keep", action="store_true", help="leave the engine running, and the file")
    parser.add_argument("--no-profile", action="store_true", help="an engine without vLLM's profiler")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the engine")
    parser.add_argument("--vllm", action="append", default=[], metavar="FLAG", help="handed to vLLM, as --vllm=--flag")
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engine is stopped then as well
    course = Course(options.out, options.budget)
    stack = Stack(options.layers, options.scale, options.version)
    wanted = Wanted() if stack.scale == "real" else Wanted(512, 16, (1, 4), (256, 1024), (1, 2))
    folder: Path | None = None
    engine: engines.Engine | None = None
    kept = False
    try:
        if not options.model:
            folder, stack = choose_folder(course, stack, options.folder)
        course.keep("layers", stack.layers)
        traces = None if options.no_profile else Path(tempfile.mkdtemp(prefix="traces-")) / "traces"
        environment = dict(item.split("=", 1) for item in options.env)

        def launch(model: Path) -> engines.Engine:
            started = engines.start(
                settings_for(model, stack, options.device, traces, options.vllm),
                course.out,
                environment,
                outlive=options.keep,
            )
            course.say(f"engine started, process {started.process.pid}, port {started.settings.port}")
            return started

        engine = make(course, folder, stack, options.quick, launch) if folder else launch(options.model)
        engine.wait(min(course.left(), 900))
        course.say(f"ready {engine.ready_seconds:.1f} s after its start")
        course.table(engine.milestones())
        course.keep("loading", {**asdict(engine.loading), "ready_seconds": engine.ready_seconds})
        Session(course, engine, stack, wanted, traces).run()
        kept = options.keep
        if kept:
            settings = engine.settings
            where = {
                "pid": engine.process.pid,
                "port": settings.port,
                "model": settings.name,
                "folder": str(settings.model_folder),
            }
            (course.out / "engine.json").write_text(json.dumps(where))
            course.say("left running: " + " ".join(f"{name.upper()}={value}" for name, value in where.items()))
    except Exception as error:
        if engine is not None:
            course.table(report.loading(engine, stack))
            course.table(engine.milestones())
        course.say(f"FAILED: {type(error).__name__}: {str(error)[-6000:]}")
        return 1
    finally:
        if engine is not None and not kept:
            engine.stop()
        if folder is not None and not kept:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if course.failed else 0


if __name__ == "__main__":
    sys.exit(main())
