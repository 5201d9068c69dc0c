"""The page: six tabs around one choice of a model and an image."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr
from torch import Tensor

from shortrun.studio import pieces, tabs
from shortrun.studio.shared import Studio
from shortrun.studio.sources import read_upload

ABOUT = """# shortrun studio
There is no encoder here: what made an image is inferred by a few steps of Langevin dynamics that start from the prior.
Choose a model and an image, then a tab."""


def build(studio: Studio) -> gr.Blocks:
    """The page, which ``launch`` serves."""
    first = next(iter(studio.sources.values()))
    with gr.Blocks(title="shortrun studio", analytics_enabled=False) as page:
        gr.Markdown(ABOUT)
        uploaded = gr.State(None, time_to_live=3600)
        with gr.Row(equal_height=False):
            with gr.Column(scale=1, min_width=220):
                model = gr.Dropdown(list(studio.sources), value=first.label, label="Model", elem_id="model")
                upload = gr.UploadButton("Use an image of yours", type="binary", elem_id="upload", size="sm")
            with gr.Column(scale=3, min_width=300):
                told_images = gr.HTML(f'<p class="quiet">{first.told}</p>')
                picker = pieces.picker()
                note = gr.HTML("", elem_id="note")
        top = [model, picker, uploaded]
        with gr.Tabs():
            with gr.Tab("Inpaint"):
                painter, kind = tabs.inpaint(studio, top)
            with gr.Tab("Watch a chain"):
                tabs.chain(studio, top)
            with gr.Tab("Move the step size"):
                tabs.steps(studio, model)
            with gr.Tab("Look into the layers"):
                tabs.layers(studio, top)
            with gr.Tab("Compare methods"):
                tabs.compare(studio, top, painter)
            with gr.Tab("Your run"):
                tabs.run(studio)

        @tabs.told(note)
        def choose_model(label: Any, mask: Any) -> Iterator[Any]:
            source = studio.source(label)
            yield {
                picker: studio.picker(source), painter: studio.painter(source, source.images[:1], mask), uploaded: None,
                told_images: f'<p class="quiet">{source.told}</p>', note: "",
            }  # fmt: skip

        @tabs.told(note)
        def choose_image(label: Any, chosen: Any, own: Tensor | None, mask: Any, painted: Any) -> Iterator[Any]:
            source = studio.source(label)
            yield {painter: studio.painter(source, studio.image(source, chosen, own)[0], mask, painted), note: ""}

        @tabs.told(note)
        def take(label: Any, content: Any, mask: Any) -> Iterator[Any]:
            source = studio.source(label)
            own = read_upload(content, source.trained.shape)
            yield {
                uploaded: own,
                picker: studio.picker(source, own),
                painter: studio.painter(source, own, mask),
                note: "",
            }

        quick: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "queue": False}
        outputs = [picker, painter, uploaded, told_images, note]
        model.change(choose_model, [model, kind], outputs, **quick)
        page.load(choose_model, [model, kind], outputs, **quick)
        picker.select(choose_image, [*top, kind, painter], [painter, note], **quick)
        kind.input(choose_image, [*top, kind, painter], [painter, note], **quick)
        painter.input(lambda: "painted", None, kind, **quick)
        upload.upload(take, [model, upload, kind], outputs, **quick)
    return page
