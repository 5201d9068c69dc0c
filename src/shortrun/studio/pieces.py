"""What the page is made of: pictures as text, rows of them, and the pieces that :file:`studio.js` brings to life."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

import gradio as gr
import numpy as np
import torch
from torch import Tensor

from shortrun.studio.work import Compared, Fills, Film, RunState, Step


def uri(image: Tensor) -> str:
    """An image ``(colours, height, width)`` in [-1, 1] as a PNG that a page can hold."""
    from PIL import Image

    levels = ((image.detach().float().nan_to_num() + 1) * 127.5).clamp(0, 255).round().byte().cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0)).save(file, "PNG")
    return png_uri(file.getvalue())


def png_uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def uris(images: Tensor) -> list[str]:
    return [uri(image) for image in images]


def heat(spread: Tensor) -> Tensor:
    """The spread of pixels ``(colours, height, width)`` as colours, from black (none) to yellow (the largest)."""
    import matplotlib

    mean = spread.mean(0)
    colours = matplotlib.colormaps["inferno"](np.asarray(mean / mean.max().clamp_min(1e-6)))[..., :3]
    return torch.from_numpy(colours).permute(2, 0, 1).float() * 2 - 1


def say(text: str) -> str:
    """One sentence, read out by screen readers."""
    return f'<p class="sentence" role="alert">{html.escape(text)}</p>' if text else ""


def tiles(images: Sequence[str], what: str) -> str:
    made = "".join(f'<img src="{each}" alt="{html.escape(what)} {i + 1}">' for i, each in enumerate(images))
    return f'<div class="tiles">{made}</div>'


def rows(parts: Sequence[tuple[str, Tensor]]) -> str:
    """Rows of images, each with its name."""
    made = "".join(
        f"<section><h4>{html.escape(name)}</h4>{tiles(uris(images), name)}</section>" for name, images in parts
    )
    return f'<div class="rows">{made}</div>'


def fills(found: Fills, x: Tensor, visible: Tensor) -> str:
    """The original, what is seen of it, the fills, their mean and their spread."""
    done = found.step >= found.steps
    seen = torch.where(visible, x, torch.zeros_like(x))
    parts = [("Original, and what is seen of it", torch.cat([x, seen]))]
    parts.append((f"{len(found.images)} fills", found.images))
    spread = found.images.std(0)
    rest = f"Their mean; {'error' if done else 'error so far'} on hidden pixels {found.error:.4f}"
    parts.append((rest, found.images.mean(0, keepdim=True)))
    level = float(spread.mean(0).max())
    text = rows(parts) + f'<div class="rows"><h4>Their spread, from black (none) to yellow ({level:.2f})</h4>'
    text += tiles([uri(heat(spread))], "Spread of the fills") + "</div>"
    state = "done" if done else f"step {found.step} of {found.steps}"
    bar = (
        f'<progress class="wide" max="{found.steps}" value="{found.step}" aria-label="Steps of the chains"></progress>'
    )
    return f'<div data-state="{state}"><p class="quiet">{state}</p>{"" if done else bar}{text}</div>'


def film_value(film: Film, x: Tensor) -> dict[str, Any]:
    numbers = {name: [_number(v) for v in getattr(film, name)] for name in ("log_joint", "gradient", "stability")}
    return {"images": uris(film.images), "original": uri(x[0]), **numbers}


def steps_value(found: Sequence[Step | None], originals: Tensor, tuned: int) -> dict[str, Any]:
    made = [
        None if step is None else {
            "step_size": step.step_size, "ours": _number(step.ours), "paper": _number(step.paper),
            "diverges": step.diverges, "steep": step.steep, "error": _number(step.error), "images": uris(step.images),
            "tuned": step.place == tuned,
        }
        for step in found
    ]  # fmt: skip
    return {"steps": made, "originals": uris(originals)}


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def compared(found: Sequence[Compared], x: Tensor, visible: Tensor) -> str:
    """A table with a line for each model."""
    seen = torch.where(visible, x, torch.zeros_like(x))
    lines = []
    for each in found:
        made = "this method cannot leave pixels out" if each.fills is None else tiles(uris(each.fills), "Fill")
        lines.append(
            f"<tr><th scope='row'>{html.escape(each.label)}<br>"
            f"<span class='quiet'>{html.escape(each.method)}</span></th>"
            f"<td>{tiles(uris(each.reconstruction), 'Reconstruction')}<span class='quiet'>MSE {each.error:.4f}, "
            f"{each.seconds:.2f} s</span></td><td>{made}</td><td>{tiles(uris(each.samples), 'Sample')}</td></tr>"
        )
    head = "<tr><th scope='col'>Model</th><th scope='col'>Reconstruction</th><th scope='col'>Fills</th>"
    head += "<th scope='col'>Samples</th></tr>"
    return (
        rows([("The image, and what is seen of it when it is filled in", torch.cat([x, seen]))])
        + f"<div class='scroll'><table class='compared'>{head}{''.join(lines)}</table></div>"
    )


def run_words(state: RunState) -> str:
    """A run in a sentence and its last pictures."""
    if not state.evaluations:
        return '<p class="told">This run has not evaluated yet.</p>'
    last = state.evaluations[-1]
    error = f"error {last['mse']:.4f}, " if last.get("mse") is not None else ""
    ago = f"{state.age:.0f} s ago" if state.age < 120 else f"{state.age / 60:.0f} minutes ago"
    text = (
        f'<p class="told">{html.escape(state.name)}: iteration {last["iteration"]}, {last["seconds"] / 60:.1f} minutes '
        f"of training, {error}step size {last.get('step_size') or 0:.4g}, divergent chains so far "
        f"{last.get('divergent') or 0}. Last heard of {ago}.</p>"
    )
    if state.picture is not None:
        text += f'<img class="wide" src="{png_uri(state.picture)}" alt="Reconstructions and samples of the run so far">'
    return text


def run_charts(state: RunState) -> dict[str, Any]:
    """Error, step size and divergent chains over the minutes of training."""
    charts = []
    lines = (
        ("mse", "held-out error (MSE)", "one", True), ("step_size", "step size s", "two", True),
        ("divergent", "divergent chains so far", "three", False),
    )  # fmt: skip
    for key, title, kind, log in lines:
        points = [(line["seconds"] / 60, line[key]) for line in state.evaluations if line.get(key) is not None]
        if points:
            x, y = ([point[axis] for point in points] for axis in (0, 1))
            series = [{"name": title, "class": kind, "x": x, "y": y}]
            charts.append({"title": title, "series": series, "logY": log, "labels": ["minutes", ""], "height": 170})
    return {"charts": charts}


# --- components ---------------------------------------------------------------------------------------


def picker() -> gr.HTML:
    """Images to choose one from; its value is ``{images, names, chosen}``, its event ``select``."""
    return gr.HTML(
        {}, html_template='<fieldset class="picker" aria-label="Image"></fieldset>', elem_id="picker",
        js_on_load="studio.picker(element, props, trigger, watch)",
    )  # fmt: skip


def painter() -> gr.HTML:
    """A mask over an image; its value is ``{image, height, width, hidden, kind}``, its event ``input``."""
    template = (
        '<div class="painter"><canvas width="336" height="336" tabindex="0" role="application" aria-label="Mask: paint '
        "over what shall be hidden; with the keyboard, arrows move, space hides, shift and arrows draw"
        '"></canvas><p class="painter-status quiet" aria-live="polite"></p><div class="painter-tools">'
        '<label>Brush <input class="painter-size" type="range" min="1" max="12" value="5"></label>'
        '<label><input class="painter-erase" type="checkbox"> Erase</label>'
        '<button type="button" class="painter-clear">Clear</button></div></div>'
    )
    return gr.HTML(
        {}, html_template=template, js_on_load="studio.painter(element, props, trigger, watch)", elem_id="painter"
    )


def live(kind: str, elem_id: str) -> gr.HTML:
    """A piece of ``studio.js`` that shows its value: ``film``, ``steps`` or ``curves``."""
    return gr.HTML(
        {},
        html_template=f'<div class="{kind}"></div>',
        js_on_load=f"studio.{kind}(element, props, watch)",
        elem_id=elem_id,
    )
