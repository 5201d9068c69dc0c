// Pieces of the page that Gradio does not have: a choice of images, a mask to paint, charts with a cursor.
// Each takes the element, the props and the functions of a gr.HTML component.
const studio = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name in element && typeof value !== "string") element[name] = value;
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  function draw(tag, attributes, parent, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  // --- a choice of images: radio buttons with pictures -------------------------------------------------
  let groups = 0;
  function picker(element, props, trigger, watch) {
    const group = `images-${++groups}`;
    const render = () => {
      const box = element.querySelector(".picker");
      const { images = [], names = [], chosen = 0 } = props.value || {};
      box.replaceChildren(...images.map((image, i) => {
        const input = make("input", { type: "radio", name: group, value: String(i), "aria-label": names[i] });
        input.checked = i === chosen;
        input.addEventListener("change", () => {
          props.value = { ...props.value, chosen: i };
          trigger("select");
        });
        return make("label", { title: names[i] }, input, make("img", { src: image, alt: "" }));
      }));
    };
    render();
    watch("value", render);
  }

  // --- a mask to paint -------------------------------------------------------------------------------
  function painter(element, props, trigger, watch) {
    const canvas = element.querySelector("canvas");
    const status = element.querySelector(".painter-status");
    const context = canvas.getContext("2d");
    let hidden = [], height = 1, width = 1, row = 0, column = 0, down = false, focused = false;
    const picture = new Image();
    picture.onload = paint;

    function read() {
      const value = props.value || {};
      height = value.height || 1;
      width = value.width || 1;
      hidden = Array.from(value.hidden || "", (letter) => letter === "1");
      hidden.length = height * width;
      row = Math.floor(height / 2);
      column = Math.floor(width / 2);
      picture.src = value.image || "";
      paint();
    }

    function paint() {
      const cell = canvas.width / width;
      canvas.height = Math.round(cell * height);
      context.imageSmoothingEnabled = false;
      if (picture.complete && picture.naturalWidth) context.drawImage(picture, 0, 0, canvas.width, canvas.height);
      for (let i = 0; i < hidden.length; i++) {
        if (!hidden[i]) continue;
        const x = (i % width) * cell, y = Math.floor(i / width) * cell;
        context.fillStyle = "#b3541e";
        context.fillRect(x, y, cell, cell);
        context.fillStyle = "#d8854d";
        context.fillRect(x + cell / 4, y + cell / 4, cell / 2, cell / 2);
      }
      if (focused) {
        context.lineWidth = 3;
        context.strokeStyle = "#fff";
        context.strokeRect(column * cell, row * cell, cell, cell);
        context.lineWidth = 1;
        context.strokeStyle = "#000";
        context.strokeRect(column * cell, row * cell, cell, cell);
      }
      const count = hidden.filter(Boolean).length;
      status.textContent = `${count} of ${height * width} pixels are hidden`;
    }

    function brush(y, x) {
      const reach = Number(element.querySelector(".painter-size").value) / 2;
      const value = !element.querySelector(".painter-erase").checked;
      for (let i = Math.max(0, Math.ceil(y - reach)); i <= Math.min(height - 1, y + reach); i++) {
        for (let j = Math.max(0, Math.ceil(x - reach)); j <= Math.min(width - 1, x + reach); j++) {
          if (Math.hypot(i - y, j - x) <= reach) hidden[i * width + j] = value;
        }
      }
      paint();
    }

    function tell() {
      const text = Array.from(hidden, (each) => (each ? "1" : "0")).join("");
      props.value = { ...props.value, hidden: text, kind: "painted" };
      trigger("input");
    }

    function at(event) {
      const box = canvas.getBoundingClientRect();
      return [
        Math.floor(((event.clientY - box.top) / box.height) * height),
        Math.floor(((event.clientX - box.left) / box.width) * width),
      ];
    }

    let last = null;
    canvas.addEventListener("pointerdown", (event) => {
      down = true;
      last = at(event);
      canvas.setPointerCapture(event.pointerId);
      brush(...last);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!down) return;
      const next = at(event), far = Math.max(Math.abs(next[0] - last[0]), Math.abs(next[1] - last[1]), 1);
      for (let i = 1; i <= far; i++) {
        brush(...last.map((from, axis) => Math.round(from + ((next[axis] - from) * i) / far)));
      }
      last = next;
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => {
        if (down) tell();
        down = false;
      });
    }
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    canvas.addEventListener("keydown", (event) => {
      if (event.key in moves) {
        row = Math.min(height - 1, Math.max(0, row + moves[event.key][0]));
        column = Math.min(width - 1, Math.max(0, column + moves[event.key][1]));
        if (event.shiftKey) brush(row, column);
        else paint();
      } else if (event.key === " " || event.key === "Enter") {
        brush(row, column);
        tell();
      } else return;
      event.preventDefault();
    });
    canvas.addEventListener("keyup", (event) => {
      if (event.key === "Shift") tell();
    });
    for (const [name, value] of [["focus", true], ["blur", false]]) {
      canvas.addEventListener(name, () => {
        focused = value && canvas.matches(":focus-visible");
        paint();
      });
    }
    element.querySelector(".painter-clear").addEventListener("click", () => {
      hidden.fill(false);
      paint();
      tell();
    });
    read();
    watch("value", read);
  }

  // --- charts ----------------------------------------------------------------------------------------
  // spec: series [{name, class, x, y}], cursor, logX, zones [{from, to, text}], labels [x, y], stars [{x, y, class}]
  function chart(holder, spec) {
    const width = Math.max(260, holder.clientWidth || 520), height = spec.height || 190;
    const space = { left: 52, right: 12, top: 14, bottom: 38 };
    const scaleY = spec.symlog
      ? (value) => Math.log10(1 + Math.abs(value) / spec.symlog) * Math.sign(value)
      : spec.logY ? Math.log10 : (value) => value;
    const scaleX = spec.logX ? Math.log10 : (value) => value;
    const points = spec.series.map((line) => line.x
      .map((x, i) => [x, line.y[i]])
      .filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y) && (!spec.logY || y > 0)));
    const xs = points.flat().map(([x]) => scaleX(x)), ys = points.flat().map(([, y]) => scaleY(y));
    holder.replaceChildren();
    if (!xs.length) return;
    const range = (values, limits = []) => {
      let [low, high] = [Math.min(...values), Math.max(...values)];
      if (limits.length) [low, high] = [Math.max(low, limits[0]), Math.min(high, limits[1])];
      return high > low ? [low, high] : [low, high + 1];
    };
    const [x0, x1] = range(spec.rangeX ? spec.rangeX.map(scaleX) : xs);
    const [y0, y1] = range(ys, spec.rangeY ? spec.rangeY.map(scaleY) : []);
    const px = (x) => space.left + ((scaleX(x) - x0) / (x1 - x0)) * (width - space.left - space.right);
    const py = (y) => {
      const share = (Math.min(scaleY(y), y1) - y0) / (y1 - y0);
      return height - space.bottom - share * (height - space.top - space.bottom);
    };
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title }, holder);
    for (const zone of spec.zones || []) {
      const left = Math.max(px(zone.from), space.left), right = Math.min(px(zone.to), width - space.right);
      const tall = height - space.top - space.bottom;
      draw("rect", { x: left, y: space.top, width: Math.max(right - left, 0), height: tall, class: "zone" }, svg);
      draw("text", { x: right - 4, y: space.top + 12, "text-anchor": "end", class: "quiet" }, svg, zone.text);
    }
    const digits = !spec.logY && y1 - y0 < 0.05 * Math.abs(y1) ? 4 : 3;
    const round = (value) => (value === 0 ? "0" : Math.abs(value) >= 10000 || Math.abs(value) < 0.001
      ? value.toExponential(0) : String(Number(value.toPrecision(digits))));
    const between = (low, high, back) => [0, 1 / 3, 2 / 3, 1].map((share) => back(low + share * (high - low)));
    const powers = (low, high) => {
      const found = [];
      for (let e = Math.floor(low) - 1; e <= Math.ceil(high); e++) {
        for (const digit of high - low > 2.5 ? [1] : [1, 2, 5]) {
          const value = digit * 10 ** e;
          if (Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9) found.push(value);
        }
      }
      return found.length > 1 ? found : between(low, high, (v) => 10 ** v);
    };
    const ticksX = spec.ticksX || (spec.logX ? powers(x0, x1) : between(x0, x1, x1 - x0 > 3 ? Math.round : (v) => v));
    let ticksY = spec.logY ? powers(y0, y1) : between(y0, y1, (v) => v);
    if (spec.symlog) ticksY = [0, 10, 100, 1000, 10000].filter((v) => scaleY(v) >= y0 && scaleY(v) <= y1);
    for (const tick of ticksY) {
      draw("line", { x1: space.left, x2: width - space.right, y1: py(tick), y2: py(tick), class: "grid" }, svg);
      draw("text", { x: space.left - 6, y: py(tick) + 4, "text-anchor": "end" }, svg, round(tick));
    }
    for (const tick of new Set(ticksX)) {
      draw("text", { x: px(tick), y: height - space.bottom + 15, "text-anchor": "middle" }, svg, round(tick));
    }
    const middle = (space.left + width - space.right) / 2;
    draw("text", { x: middle, y: height - 5, "text-anchor": "middle", class: "quiet" }, svg, spec.labels[0]);
    const clip = `clip-${++groups}`;
    const area = draw("clipPath", { id: clip }, svg);
    const box = { x: space.left, y: 0, width: width - space.left - space.right, height: height - space.bottom };
    draw("rect", box, area);
    spec.series.forEach((line, i) => {
      const path = points[i].map(([x, y], j) => `${j ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
      draw("path", { d: path, class: `line ${line.class}`, "clip-path": `url(#${clip})` }, svg);
    });
    for (const star of spec.stars || []) {
      draw("text", { x: px(star.x), y: py(star.y) + 6, "text-anchor": "middle", class: `star ${star.class}` }, svg, "★");
    }
    let line = null, dots = [];
    if (spec.cursor !== undefined) {
      line = draw("line", { y1: space.top, y2: height - space.bottom, class: "cursor" }, svg);
      dots = spec.series.map((each) => draw("circle", { r: 5, class: `dot ${each.class}` }, svg));
      move(spec.cursor);
    }
    function move(x) {
      if (!line) return;
      line.setAttribute("x1", px(x));
      line.setAttribute("x2", px(x));
      spec.series.forEach((each, i) => {
        const y = each.y[each.x.findIndex((value) => value === x)];
        dots[i].style.display = Number.isFinite(y) ? "" : "none";
        if (Number.isFinite(y)) {
          dots[i].setAttribute("cx", px(x));
          dots[i].setAttribute("cy", py(y));
        }
      });
    }
    return move;
  }

  function legend(series) {
    return make("p", { class: "legend" }, ...series.map((each) =>
      make("span", { class: `key ${each.class}` }, each.name)));
  }

  function whenResized(element, render) {
    let width = element.clientWidth;
    new ResizeObserver(() => {
      if (Math.abs(element.clientWidth - width) > 4) {
        width = element.clientWidth;
        render();
      }
    }).observe(element);
  }

  const short = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "not finite");

  // --- a chain: film strip, slider over k, three numbers along it ------------------------------------
  function film(element, props, watch) {
    const root = element.querySelector(".film");
    let k = null;
    function render() {
      const value = props.value || {};
      root.replaceChildren();
      if (!value.images) return;
      const last = value.images.length - 1;
      k = last;
      const big = make("img", { class: "big", alt: "" });
      const told = make("p", { class: "told", "aria-live": "polite" });
      const slider = make("input", { type: "range", min: "0", max: String(last), value: String(k) });
      slider.id = `film-${++groups}`;
      const label = make("label", { for: slider.id }, "Step k of the chain");
      const strip = make("div", { class: "strip" }, ...value.images.map((image, i) => {
        const frame = make("img", { src: image, alt: `k = ${i}` });
        frame.addEventListener("click", () => show(i));
        return frame;
      }));
      const x = value.images.map((_, i) => i);
      const charts = [
        ["log joint, nats", value.log_joint, "one"],
        ["length of its gradient", value.gradient, "two"],
        ["s × λ (a linear model is stable below 2)", value.stability, "three"],
      ].map(([name, y, kind]) => {
        const holder = make("div", { class: "chart" });
        const sound = y.filter(Number.isFinite);
        const spec = { series: [{ name, class: kind, x, y }], cursor: k, labels: ["k", ""], height: 150, title: name };
        if (kind === "one") spec.rangeY = [Math.min(...y.slice(Math.ceil(last / 5)).filter(Number.isFinite)), Math.max(...sound)];
        if (kind === "two") spec.logY = true;
        return { holder, name, spec, move: null };
      });
      const panels = charts.map(({ holder, name }) => make("div", {}, make("p", { class: "quiet" }, name), holder));
      root.append(
        make("div", { class: "film-top" }, make("figure", {}, big, make("figcaption", {}, told)),
          make("figure", {}, make("img", { class: "big", src: value.original, alt: "The image that is inferred" }),
            make("figcaption", {}, make("p", { class: "told" }, "the image")))),
        make("div", { class: "slider" }, label, slider), strip, make("div", { class: "charts" }, ...panels),
      );
      function drawCharts() {
        for (const each of charts) {
          each.spec.cursor = k;
          each.move = chart(each.holder, each.spec);
        }
      }
      function show(next) {
        k = next;
        slider.value = String(k);
        big.src = value.images[k];
        big.alt = `The image at step ${k}`;
        told.textContent = `k = ${k} of ${last}: log joint ${short(value.log_joint[k])}, gradient ` +
          `${short(value.gradient[k])}, s × λ ${short(value.stability[k])}`;
        strip.childNodes.forEach((frame, i) => frame.classList.toggle("chosen", i === k));
        for (const each of charts) if (each.move) each.move(k);
      }
      slider.addEventListener("input", () => show(Number(slider.value)));
      drawCharts();
      show(last);
      whenResized(root, drawCharts);
    }
    render();
    watch("value", render);
  }

  // --- the step size: two criteria, a point that moves along them, and what it does to images --------
  function steps(element, props, watch) {
    const root = element.querySelector(".steps");
    let at = null, wanted = null; // the step size that somebody has chosen; curves grow while one looks
    function render() {
      const value = props.value || {};
      root.replaceChildren();
      const known = (value.steps || []).filter((step) => step);
      if (!known.length) return;
      at = known.findIndex((step) => step.step_size === wanted);
      if (at < 0) at = Math.max(known.findIndex((step) => step.tuned), 0);
      const x = known.map((step) => step.step_size);
      const above = (key) => {
        const sound = known.filter((step) => !step.diverges).map((step) => step[key]).filter(Number.isFinite);
        const lowest = Math.min(...(sound.length ? sound : [0]));
        return { lowest, y: known.map((step) => (Number.isFinite(step[key]) ? Math.max(step[key] - lowest, 0) : 1e6)) };
      };
      const ours = above("ours"), paper = above("paper");
      const series = [
        { name: "ours (counts the noise, too)", class: "one", x, y: ours.y },
        { name: "the paper's criterion", class: "two", x, y: paper.y },
      ];
      const stars = [[ours, "one"], [paper, "two"]].map(([each, kind]) => {
        const best = known.findIndex((step, i) => !step.diverges && each.y[i] === 0);
        return best < 0 ? null : { x: x[best], y: 0, class: kind };
      }).filter(Boolean);
      const out = known.findIndex((step, i) => known.slice(i).every((other) => other.diverges));
      const zones = out < 0 ? [] : [{
        from: out ? Math.sqrt(x[out] * x[out - 1]) : x[out], to: x[x.length - 1], text: "chains diverge",
      }];
      const curve = make("div", { class: "chart" }), errors = make("div", { class: "chart" });
      const slider = make("input", { type: "range", min: "0", max: String(known.length - 1), value: String(at) });
      slider.id = `steps-${++groups}`;
      const told = make("p", { class: "told", "aria-live": "polite" });
      const made = make("div", { class: "tiles" });
      const tiles = (images, what) => images.map((image, i) => make("img", { src: image, alt: `${what} ${i + 1}` }));
      root.append(
        make("p", { class: "quiet" }, "KL divergence to the posterior, up to a constant: nats above the lowest, ",
          "logarithmic beyond 10. ★ is the step that a criterion chooses."),
        legend(series), curve,
        make("div", { class: "slider" }, make("label", { for: slider.id }, "Step size s"), slider), told,
        make("div", { class: "pictures" },
          make("div", {}, make("h4", {}, "Images"), make("div", { class: "tiles" }, ...tiles(value.originals, "Image"))),
          make("div", {}, make("h4", {}, "Reconstructed with this step"), made)),
        make("p", { class: "quiet" }, "Mean squared error of the reconstructions:"), errors,
      );
      const options = { logX: true, labels: ["step size s", ""], zones, cursor: x[at] };
      let moves = [];
      function drawCharts() {
        options.cursor = x[at];
        moves = [
          chart(curve, {
            ...options, series, stars, symlog: 10, rangeY: [0, 3000], height: 270,
            title: "Free energy over the step size, by two criteria",
          }),
          chart(errors, {
            ...options, series: [{ name: "error", class: "three", x, y: known.map((step) => step.error) }],
            logY: true, height: 150, title: "Error of reconstructions over the step size",
          }),
        ];
      }
      function show(next) {
        at = next;
        slider.value = String(at);
        const step = known[at];
        slider.setAttribute("aria-valuetext", `s = ${short(step.step_size)}`);
        told.textContent = `s = ${short(step.step_size)}${step.tuned ? " (tuned)" : ""}: free energy ` +
          `${short(step.ours)} (ours), ${short(step.paper)} (the paper's); error ${short(step.error)}` +
          `${step.diverges ? "; chains diverge" : step.steep ? "; a tenth of the chains are steeper than is safe" : ""}`;
        made.replaceChildren(...tiles(step.images, "Reconstruction"));
        for (const move of moves) if (move) move(x[at]);
      }
      slider.addEventListener("input", () => {
        wanted = known[Number(slider.value)].step_size;
        show(Number(slider.value));
      });
      drawCharts();
      show(at);
      whenResized(root, drawCharts);
    }
    render();
    watch("value", render);
  }

  // --- curves of a run ------------------------------------------------------------------------------
  function curves(element, props, watch) {
    const root = element.querySelector(".curves");
    function render() {
      root.replaceChildren();
      for (const spec of (props.value || {}).charts || []) {
        const holder = make("div", { class: "chart" });
        root.append(make("div", {}, make("p", { class: "quiet" }, spec.title), holder));
        chart(holder, spec);
      }
    }
    render();
    watch("value", render);
    whenResized(root, render);
  }

  return { picker, painter, film, steps, curves };
})();
window.studio = studio;
