"""The six tabs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from shortrun.core.langevin import DivergenceError
from shortrun.studio import pieces, snippets, work
from shortrun.studio.shared import MOST_SEED, Studio, whole_number
from shortrun.studio.sources import hidden_places

MASKS = ("painted", "lower-half", "upper-half", "left-half", "right-half", "random:0.3", "blocks:6:3")
CHAINS = "chains"  # all that runs chains waits in one queue
TUNED = work.STEP_GRID.index(1.0)


def told(note: gr.HTML) -> Callable[[Callable[..., Iterator[Any]]], Callable[..., Iterator[Any]]]:
    """What goes wrong becomes a sentence on the page."""

    def wrap(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @functools.wraps(handler)
        def run(*values: Any) -> Iterator[Any]:
            try:
                yield from handler(*values)
            except work.Stopped:
                yield {note: pieces.say("Stopped.")}
            except (ValueError, TypeError, OSError, DivergenceError) as error:
                yield {note: pieces.say(str(error))}

        return run

    return wrap


class Same:
    """The Python and the command line that do the same."""

    def __init__(self) -> None:
        with gr.Accordion("The same in Python and on the command line", open=False):
            self.python = gr.Code(language="python", label="Python", interactive=False, elem_classes="snippet")
            self.shell = gr.Code(language="shell", label="Command line", interactive=False, elem_classes="snippet")

    def show(self, snippet: snippets.Snippet) -> dict[Any, str]:
        return {self.python: snippet.python, self.shell: snippet.shell}

    @property
    def parts(self) -> list[Any]:
        return [self.python, self.shell]


def _seed() -> gr.Number:
    return gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MOST_SEED, min_width=110)


def _slow(**more: Any) -> dict[str, Any]:
    return {"concurrency_id": CHAINS, "show_progress": "minimal", "api_visibility": "private", **more}


def inpaint(studio: Studio, top: list[Any]) -> tuple[gr.HTML, gr.Dropdown]:
    gr.Markdown("Hide a part of the image; chains that see only the rest paint it, several times.")
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=280):
            painter = pieces.painter()
            kind = gr.Dropdown(list(MASKS), value="lower-half", label="Mask", elem_id="mask")
            seed = _seed()
            with gr.Row():
                fill = gr.Button("Fill in", variant="primary", elem_id="fill")
                stop = gr.Button("Stop", elem_id="stop")
        with gr.Column(scale=2, min_width=300):
            note = gr.HTML("", elem_id="inpaint-note")
            result = gr.HTML("", elem_id="fills")
    same = Same()

    @told(note)
    def run(label: Any, chosen: Any, own: Any, painted: Any, seed: Any, request: gr.Request) -> Iterator[Any]:
        source = studio.source(label)
        x, number = studio.image(source, chosen, own)
        painted = painted if isinstance(painted, dict) else {}
        visible = hidden_places(painted.get("hidden"), source.trained.shape)
        seed = whole_number(seed)
        event = studio.stops[str(request.session_hash)] = threading.Event()
        kind = painted.get("kind") if painted.get("kind") in MASKS else "painted"
        yield {note: "", **same.show(snippets.inpaint(source, number, str(kind), seed, work.FILLS))}
        try:
            for found in work.inpaint(source, x, visible, seed, event):
                yield {result: pieces.fills(found, x, visible)}
        finally:
            studio.stops.pop(str(request.session_hash), None)
        mask = pieces.uri(visible[0].float() * 2 - 1)
        link = f'<p class="quiet"><a download="mask.png" href="{mask}">mask.png</a></p>'
        yield {result: pieces.fills(found, x, visible) + link}

    def end(request: gr.Request) -> None:
        if (event := studio.stops.get(str(request.session_hash))) is not None:
            event.set()

    fill.click(run, [*top, painter, seed], [result, note, *same.parts], **_slow())
    stop.click(end, queue=False, api_visibility="private")
    return painter, kind


def chain(studio: Studio, top: list[Any]) -> None:
    gr.Markdown("All K steps from a draw of the prior to an answer. Move the slider.")
    with gr.Row():
        seed = _seed()
        noise = gr.Checkbox(True, label="Noise in each step")
        watch = gr.Button("Run the chain", variant="primary", elem_id="run-chain")
        again = gr.Button("From another start", elem_id="another-start")
    note = gr.HTML("", elem_id="chain-note")
    film = pieces.live("film", "film")
    same = Same()

    @told(note)
    def run(label: Any, chosen: Any, own: Any, value: Any, noisy: Any) -> Iterator[Any]:
        source = studio.source(label)
        source.trained._check_dynamics()
        x, number = studio.image(source, chosen, own)
        start = whole_number(value)
        made = work.watch_chain(source, x, start, bool(noisy))
        snippet = snippets.chain(source, number, start, bool(noisy))
        yield {film: pieces.film_value(made, x), note: "", **same.show(snippet)}

    outputs = [film, note, *same.parts]
    watch.click(run, [*top, seed, noise], outputs, **_slow())
    noise.change(run, [*top, seed, noise], outputs, **_slow())
    again.click(
        lambda value: (int(value or 0) + 1) % MOST_SEED, seed, seed, queue=False, api_visibility="private"
    ).then(run, [*top, seed, noise], outputs, **_slow())


def steps(studio: Studio, model: gr.Dropdown) -> None:
    gr.Markdown(
        "The step size is the one knob. Too short, and chains are still near the prior; too long, and they diverge. "
        "The right one minimises the free energy. Move the slider: the point and the reconstructions follow."
    )
    show = gr.Button("Compute the curve", variant="primary", elem_id="curve")
    note = gr.HTML("", elem_id="steps-note")
    steps = pieces.live("steps", "steps")
    same = Same()

    @told(note)
    def run(label: Any) -> Iterator[Any]:
        source = studio.source(label)
        source.trained._check_dynamics()
        yield {note: "", **same.show(snippets.step_sizes(source))}
        originals = source.images[: work.ROW]
        for found in studio.curves[label].looks():
            known = sum(step is not None for step in found)
            words = "" if known == len(found) else f"{known} of {len(found)} step sizes are computed."
            yield {steps: pieces.steps_value(found, originals, TUNED), note: f'<p class="quiet">{words}</p>'}

    outputs = [steps, note, *same.parts]
    show.click(run, model, outputs, show_progress="hidden", api_visibility="private", concurrency_limit=8)


def layers(studio: Studio, top: list[Any]) -> None:
    gr.Markdown("What does each layer hold? Draw one again and keep the others; or go from one image to another.")
    with gr.Row():
        seed = _seed()
        sampled = gr.Radio(["the chosen image", "a sample"], value="the chosen image", label="Begin with")
        other = gr.Number(1, label="Number of the other image", precision=0, minimum=0, min_width=110)
    with gr.Row():
        resample = gr.Button("Resample each layer", variant="primary", elem_id="resample")
        between = gr.Button("Interpolate to the other image", elem_id="interpolate")
        draw = gr.Button("Samples under each prior", elem_id="samples")
    note = gr.HTML("", elem_id="layers-note")
    result = gr.HTML("", elem_id="layers")
    same = Same()

    @told(note)
    def layers(label: Any, chosen: Any, own: Any, value: Any, begin: Any) -> Iterator[Any]:
        source = studio.source(label)
        x, number = studio.image(source, chosen, own)
        start, drawn = whole_number(value), begin == "a sample"
        made = work.resample_layers(source, None if drawn else x, start)
        yield {result: pieces.rows(made), note: "", **same.show(snippets.layers(source, number, start, drawn))}

    @told(note)
    def path(label: Any, chosen: Any, own: Any, last: Any) -> Iterator[Any]:
        source = studio.source(label)
        (x, number), last = studio.image(source, chosen, own), whole_number(last)
        end, _ = studio.image(source, {"chosen": last}, None)
        made = [("From one image to the other", work.interpolate(source, x, end))]
        yield {result: pieces.rows(made), note: "", **same.show(snippets.interpolate(source, number, last))}

    @told(note)
    def samples(label: Any, value: Any) -> Iterator[Any]:
        source, start = studio.source(label), whole_number(value)
        made = work.samples(source, start)
        yield {result: pieces.rows(made), note: "", **same.show(snippets.samples(source, start, len(made[0][1])))}

    outputs = [result, note, *same.parts]
    resample.click(layers, [*top, seed, sampled], outputs, **_slow())
    between.click(path, [*top, other], outputs, **_slow())
    draw.click(samples, [top[0], seed], outputs, **_slow())


def compare(studio: Studio, top: list[Any], painter: gr.HTML) -> None:
    gr.Markdown(
        "The same image by all models on show that make images of its shape, with the mask of the first tab. "
        "`shortrun compare` trains several methods; `shortrun studio RUN RUN ..` shows them here."
    )
    with gr.Row():
        seed = _seed()
        go = gr.Button("Compare", variant="primary", elem_id="compare")
    note = gr.HTML("", elem_id="compare-note")
    result = gr.HTML("", elem_id="compared")
    same = Same()

    @told(note)
    def run(label: Any, chosen: Any, own: Any, painted: Any, value: Any) -> Iterator[Any]:
        source = studio.source(label)
        x, number = studio.image(source, chosen, own)
        painted = painted if isinstance(painted, dict) else {}
        visible = hidden_places(painted.get("hidden"), source.trained.shape)
        start = whole_number(value)
        others = [each for each in studio.sources.values() if each.trained.shape == source.trained.shape]
        kind = painted.get("kind") if painted.get("kind") in MASKS else "painted"
        words = "" if len(others) > 1 else f'<p class="quiet">Only {source.label} makes images of this shape.</p>'
        yield {note: words, **same.show(snippets.compare(source, number, str(kind), start))}
        found = []
        for each in work.compare(others, x, visible, start):
            found.append(each)
            yield {result: pieces.compared(found, x, visible)}

    go.click(run, [*top, painter, seed], [result, note, *same.parts], **_slow())


def run(studio: Studio) -> None:
    gr.Markdown("A run while it trains: its curves and pictures, read again every few seconds.")
    found = studio.folders()
    with gr.Row():
        folder = gr.Dropdown(
            found, value=found[0] if found else None, label="Run folder", allow_custom_value=studio.any_folder,
            elem_id="folder",
        )  # fmt: skip
        follow = gr.Button("Show", variant="primary", elem_id="follow")
    note = gr.HTML("", elem_id="run-note")
    curves = pieces.live("curves", "curves")
    words = gr.HTML("", elem_id="run-words")
    same = Same()
    timer = gr.Timer(5, active=False)

    @told(note)
    def read(name: Any) -> Iterator[Any]:
        if not name:
            raise ValueError("There is no run yet: give a run folder, such as runs/digits.")
        if not studio.any_folder and name not in studio.folders():
            raise ValueError(f"{name!r} is not one of the runs on show.")
        state = work.read_run(Path(str(name)).expanduser())
        yield {
            curves: pieces.run_charts(state), words: pieces.run_words(state), note: "", timer: gr.Timer(active=True),
            **same.show(snippets.run(str(name))),
        }  # fmt: skip

    outputs = [curves, words, note, timer, *same.parts]
    follow.click(read, folder, outputs, show_progress="hidden", api_visibility="private", queue=False)
    timer.tick(read, folder, outputs, show_progress="hidden", api_visibility="private", queue=False)
