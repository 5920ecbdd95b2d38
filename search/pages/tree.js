"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const nodes = data.nodes;
  const size = nodes.parent.length;
  const $ = (id) => document.getElementById(id);
  const HUES = ["#3b82d0", "#c2559d", "#2a9d8f", "#d08a1e", "#8062d6", "#c8553d", "#5b8c3a", "#4a90a4"];
  const MAX_ROWS = 500000;
  const LONG = 20000;

  // The tree as first-child and next-sibling arrays; parents come before their children.
  const first = new Int32Array(size).fill(-1);
  const last = new Int32Array(size).fill(-1);
  const next = new Int32Array(size).fill(-1);
  const depth = new Int32Array(size);
  const weight = new Float64Array(size);
  for (let i = 1; i < size; i++) {
    const p = nodes.parent[i];
    depth[i] = depth[p] + 1;
    if (first[p] < 0) first[p] = i;
    else next[last[p]] = i;
    last[p] = i;
  }
  for (let i = size - 1; i >= 0; i--) {
    if (nodes.visits) weight[i] = Math.max(nodes.visits[i] || 0, 0.25);
    else {
      if (first[i] < 0) weight[i] = 1;
      if (i) weight[nodes.parent[i]] += weight[i];
    }
  }
  const onPath = new Uint8Array(size);
  for (let i = data.chosen ?? -1; i >= 0; i = i ? nodes.parent[i] : -1) onPath[i] = 1;

  const open = new Uint8Array(size);
  let picked = data.chosen ?? 0;
  let ready = false;
  let viewer = null;
  let explain = false;
  let rows = new Int32Array(0);
  // Nodes are in the order in which they were added, so the first of them are the search at an earlier time.
  let grown = size;
  const there = (i) => i >= 0 && i < grown;

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const text = (i) => data.texts[nodes.text[i]];
  const column = (name, i) => (nodes[name] ? nodes[name][i] : null);
  // Programs have no graph, so their readers have met no sink.
  const end = data.program ? "end" : "sink";
  const who = (agent) => (agent === -1 ? "question" : agent >= data.agents.length ? end : data.agents[agent]);
  const hue = (agent) => (agent < 0 || agent >= data.agents.length ? "var(--dim)" : HUES[agent % HUES.length]);
  const short = (x) => (x === null || x === undefined ? "–" : Math.abs(x) >= 1000 ? x.toFixed(0) : String(+x.toFixed(3)));
  const snippet = (s) => s.slice(0, 240).trim().replace(/\s*\n\s*/g, " · ") || "(empty)";
  const worth = (i) => column("q", i) ?? column("value", i);
  const pathTo = (i) => {
    const path = [];
    for (let j = i; ; j = nodes.parent[j]) {
      path.push(j);
      if (j === 0) break;
    }
    return path.reverse();
  };

  // Colors span the critic's scale or the values of this tree, from orange (worst) through grey to green (best).
  let low = Infinity;
  let high = -Infinity;
  let onScale = false;
  for (let i = 1; i < size; i++) {
    const q = worth(i);
    if (q !== null && q !== undefined) {
      low = Math.min(low, q);
      high = Math.max(high, q);
    }
  }
  // Values of learned critics and rewards lie in [-1, 1]; likelihoods are never negative and only rank.
  const scaled = low < 0 && low >= -1 && high <= 1;
  onScale = scaled;
  const ends = () => (onScale ? [-1, 1] : [low, high]);
  const mix = (a, b, t) => a.map((x, k) => Math.round(x + (b[k] - x) * t));
  const tint = (q) => {
    if (q === null || q === undefined || low > high) return "rgb(190,197,206)";
    const [from, to] = ends();
    const t = to > from ? (q - from) / (to - from) : 0.5;
    const span = t < 0.5 ? [[240, 150, 92], [222, 222, 214], t * 2] : [[222, 222, 214], [84, 196, 156], t * 2 - 1];
    return `rgb(${mix(...span).join(",")})`;
  };

  function rebuild() {
    const out = [];
    const stack = [0];
    while (stack.length && out.length < MAX_ROWS) {
      const i = stack.pop();
      out.push(i);
      if (!open[i]) continue;
      const from = stack.length;
      for (let c = first[i]; there(c); c = next[c]) stack.push(c);
      for (let a = from, b = stack.length - 1; a < b; a++, b--) [stack[a], stack[b]] = [stack[b], stack[a]];
    }
    rows = Int32Array.from(out);
    $("rows").style.height = `${rows.length * rowHeight()}px`;
    $("count").textContent = `${rows.length.toLocaleString("en")} of ${size.toLocaleString("en")} nodes shown`;
    paint();
  }

  const narrow = () => window.innerWidth <= 820;
  const rowHeight = () => (narrow() ? 58 : 38);

  function drawRow(place) {
    const i = rows[place];
    const row = element("div", "row");
    row.id = `n${i}`;
    row.dataset.node = i;
    row.setAttribute("role", "treeitem");
    row.setAttribute("aria-level", depth[i] + 1);
    row.setAttribute("aria-selected", i === picked);
    if (first[i] >= 0) row.setAttribute("aria-expanded", !!open[i]);
    if (onPath[i]) row.classList.add("path");
    if (i === picked) row.classList.add("picked");
    row.style.top = `${place * rowHeight()}px`;
    row.style.setProperty("--indent", `${Math.min(depth[i], narrow() ? 6 : 16) * 16}px`);
    row.append(element("span", "twist", !there(first[i]) ? "" : open[i] ? "▼" : "▶"));
    const agent = element("span", "agent", i ? who(nodes.speaker[i]) : "question");
    agent.style.setProperty("--hue", hue(i ? nodes.speaker[i] : -1));
    const says = element("span", "says", snippet(i ? text(i) : data.question));
    says.dir = "auto";
    row.append(agent);
    if (column("tag", i)) row.append(element("span", "arm", column("tag", i)));
    row.append(says);
    const right = column("correct", i);
    if (right !== null && right !== undefined) row.append(element("span", `mark ${right ? "good" : "bad"}`, right ? "✓" : "✗"));
    if (nodes.visits) row.append(figure("N", short(nodes.visits[i])));
    if (i && worth(i) !== null && worth(i) !== undefined) {
      const pill = element("span", "figure pill", worth(i).toFixed(3));
      pill.style.background = tint(worth(i));
      pill.title = nodes.q ? "Q, the mean of the values backed up" : "value by the critic";
      row.append(pill);
    }
    return row;
  }

  function figure(name, value) {
    const box = element("span", "figure");
    box.append(element("b", "", name), value);
    return box;
  }

  function paint() {
    const tree = $("tree");
    const h = rowHeight();
    const from = Math.max(0, Math.floor(tree.scrollTop / h) - 8);
    const to = Math.min(rows.length, from + Math.ceil(tree.clientHeight / h) + 16);
    const drawn = [];
    for (let place = from; place < to; place++) drawn.push(drawRow(place));
    $("rows").replaceChildren(...drawn);
    tree.setAttribute("aria-activedescendant", `n${picked}`);
  }

  function reveal(i) {
    let changed = false;
    for (let j = i; j > 0; ) {
      j = nodes.parent[j];
      if (!open[j]) changed = open[j] = 1;
    }
    if (changed) rebuild();
    const place = rows.indexOf(i);
    const tree = $("tree");
    const h = rowHeight();
    if (place * h < tree.scrollTop) tree.scrollTop = Math.max(0, place * h - h);
    else if ((place + 1) * h > tree.scrollTop + tree.clientHeight) tree.scrollTop = (place + 2) * h - tree.clientHeight;
  }

  function pick(i) {
    if (!there(i)) replay(size);
    picked = i;
    viewer = null;
    // In a small window the detail covers part of the list, so it waits until the reader picks a message.
    document.body.classList.toggle("reading", ready);
    reveal(i);
    paint();
    showDetail();
    drawMap();
  }

  function toggle(i, to = !open[i]) {
    if (first[i] < 0) return;
    open[i] = to ? 1 : 0;
    rebuild();
  }

  function message(label, agent, body) {
    const title = element("p", "say-who", label);
    const block = element("pre", "say");
    block.style.setProperty("--hue", hue(agent));
    block.dir = "auto";
    if (!body.trim()) block.append(element("span", "empty", "(empty message)"));
    else block.textContent = body.slice(0, LONG);
    const parts = [title, block];
    if (body.length > LONG) {
      const more = element("button", "", `Show all ${body.length.toLocaleString("en")} characters`);
      more.onclick = () => {
        block.textContent = body;
        block.tabIndex = 0;
        block.focus();
        more.remove();
      };
      parts.push(more);
    }
    return parts;
  }

  function crumbs(path) {
    const box = element("nav", "crumbs");
    const shown = path.length > 12 ? [path[0], -1, ...path.slice(-8)] : path;
    shown.forEach((j, k) => {
      if (k) box.append(element("span", "dim", "›"));
      if (j < 0) return box.append(element("span", "dim", `${path.length - 9} more`));
      const link = element("button", j === picked ? "here" : "", j ? who(nodes.speaker[j]) : "question");
      link.type = "button";
      link.onclick = () => {
        pick(j);
        document.querySelector(".crumbs .here").focus();
      };
      box.append(link);
    });
    return box;
  }

  function stats(i) {
    const box = element("dl", "stats");
    const hints = element("dl", "facts");
    const add = (name, value, hint) => {
      if (value === null || value === undefined) return;
      const cell = element("div");
      cell.append(element("dt", "", name), element("dd", "", typeof value === "number" ? short(value) : value));
      box.append(cell);
      const meaning = element("div");
      meaning.append(element("dt", "", name), element("dd", "", hint));
      hints.append(meaning);
    };
    add("visits N", column("visits", i), "simulations through this node");
    add("Q", column("q", i), "mean of the values backed up");
    add("value V", column("value", i), "value by the critic");
    add("mean logprob", column("logprob", i), "mean log-probability per token, nats");
    add("model", column("tag", i) || null, "arm of the policy that wrote this message");
    add("tokens", i ? column("tokens", i) : null, "generated tokens of this message");
    add("answer", column("answer", i), "answer read from this message");
    let children = 0;
    for (let c = first[i]; c >= 0; c = next[c]) children++;
    add("children", children, "messages tried after this one");
    const explained = element("details", "dim");
    explained.open = explain;
    explained.ontoggle = () => (explain = explained.open);
    explained.append(element("summary", "", "What these figures mean"), hints);
    return [box, explained];
  }

  // Without an agent the whole transcript: the prompts of a program are its own.
  function localView(path, agent) {
    const parts = [];
    if (agent === null || data.sees_question[agent]) parts.push(...message("question", -1, data.question));
    const seen = path.slice(1).filter((j) => agent === null || nodes.speaker[j] === agent || nodes.recipients[j].includes(agent));
    for (const j of seen.slice(-200)) parts.push(...message(`${who(nodes.speaker[j])} → ${nodes.recipients[j].map(who).join(", ")}`, nodes.speaker[j], text(j)));
    if (seen.length > 200) parts.unshift(element("p", "dim", `${seen.length - 200} older messages not shown`));
    return parts.length ? parts : [element("p", "dim", "Nothing: this agent received no message.")];
  }

  // What a program sent to the model, tool results included; known on the chosen path.
  function request(messages) {
    const box = element("details", "request");
    box.append(element("summary", "", `Request: ${messages.length} message${messages.length === 1 ? "" : "s"}`));
    for (const [role, words] of messages) box.append(...message(role === "tool" ? "tool result" : role, -1, data.texts[words]));
    return box;
  }

  function showDetail() {
    const i = picked;
    const path = pathTo(i);
    const box = $("detail");
    const parts = [crumbs(path)];
    if (i) {
      const to = nodes.recipients[i].map(who).join(", ");
      const title = element("h2", "", `${who(nodes.speaker[i])} → ${to}`);
      const right = column("correct", i);
      if (right !== null && right !== undefined) title.append(element("span", right ? "good" : "bad", right ? "  ✓ right" : "  ✗ wrong"));
      parts.push(title, ...stats(i), element("h3", "", "Message"), ...message("", nodes.speaker[i], text(i)).slice(1));
    } else parts.push(element("h2", "", "Root"), ...stats(0), element("h3", "", "Question"), ...message("", -1, data.question).slice(1));
    if (data.program) {
      if (data.requests[i]) parts.push(request(data.requests[i]));
      if (i) parts.push(element("h3", "", "The run before it"), ...localView(path.slice(0, -1), null));
    } else if (data.agents.length) {
      const agent = viewer ?? (i ? nodes.speaker[i] : 0);
      // The speaker saw the transcript before its message; every other agent sees it up to this node.
      const before = i && agent === nodes.speaker[i] ? path.slice(0, -1) : path;
      const pickAgent = element("div", "pick-agent");
      const choice = element("select");
      choice.setAttribute("aria-label", "Whose local view");
      data.agents.forEach((name, k) => {
        const option = element("option", "", name);
        option.value = k;
        option.selected = k === agent;
        choice.append(option);
      });
      choice.onchange = () => {
        viewer = Number(choice.value);
        showDetail();
        // The list is drawn anew; the next arrow key must reach it.
        document.querySelector(".pick-agent select").focus();
      };
      pickAgent.append(element("h3", "", i && agent === nodes.speaker[i] ? "What the speaker saw:" : "What an agent sees here:"), choice);
      parts.push(pickAgent, ...localView(before, agent));
    }
    box.replaceChildren(...parts);
    box.scrollTop = 0;
  }

  // The map: one band per depth; a node's share of its parent's width is its share of the visits.
  let cells = [];
  let band = 18;
  function drawMap() {
    const canvas = $("map");
    const width = canvas.clientWidth;
    let deepest = 0;
    for (let i = 0; i < size; i++) if (depth[i] > deepest) deepest = depth[i];
    const bands = Math.min(deepest + 1, 24);
    const top = Math.max(0, Math.min(depth[picked] - bands + 3, deepest + 1 - bands));
    const tall = (band = bands > 10 ? 9 : 18);
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${bands * tall}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(bands * tall * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    cells = [];
    let start = picked;
    while (depth[start] > top) start = nodes.parent[start];
    const stack = [[start, 0, width]];
    const style = getComputedStyle(document.documentElement);
    const gold = style.getPropertyValue("--path");
    const edge = style.getPropertyValue("--pick-edge");
    while (stack.length) {
      const [i, x, w] = stack.pop();
      const y = (depth[i] - top) * tall;
      if (y >= bands * tall) continue;
      pen.fillStyle = i ? tint(worth(i)) : "rgb(190,197,206)";
      pen.fillRect(x, y, Math.max(w - (w > 3 ? 1 : 0), 0.5), tall - 1);
      if (onPath[i] && w > 2) {
        pen.fillStyle = gold;
        pen.fillRect(x, y + tall - 4, w - 1, 3);
      }
      if (i === picked && w > 2) {
        pen.strokeStyle = edge;
        pen.lineWidth = 2;
        pen.strokeRect(x + 1, y + 1, Math.max(w - 3, 1), tall - 3);
      }
      cells.push([x, y, w, i]);
      let sum = 0;
      for (let c = first[i]; there(c); c = next[c]) sum += weight[c];
      const all = Math.max(sum, weight[i]);
      let at = x;
      for (let c = first[i]; there(c); c = next[c]) {
        const share = (w * weight[c]) / all;
        if (share >= 0.4) stack.push([c, at, share]);
        at += share;
      }
    }
    $("map-note").textContent = `width: ${nodes.visits ? "visits" : "leaves"}, one band per turn, gold: the answer`;
  }

  $("map").addEventListener("click", (event) => {
    const hit = cells.findLast(([x, y, w]) => event.offsetX >= x && event.offsetX < x + w && event.offsetY >= y && event.offsetY < y + band);
    if (hit) pick(hit[3]);
  });
  $("tree").addEventListener("scroll", () => requestAnimationFrame(paint));
  $("tree").addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    const i = Number(row.dataset.node);
    if (event.target.closest(".twist")) toggle(i);
    pick(i);
  });
  window.addEventListener("resize", () => {
    rebuild();
    drawMap();
  });

  function closeAll() {
    open.fill(0);
    for (let i = 0; i < size; i++) if (onPath[i]) open[i] = 1;
    open[0] = 1;
    rebuild();
    pick(data.chosen ?? 0);
  }
  function openAll() {
    open.fill(1);
    rebuild();
    pick(picked);
  }
  function replay(to) {
    grown = Math.max(2, Math.min(size, to));
    $("replay").value = grown - 1;
    $("replay-note").textContent = `${(grown - 1).toLocaleString("en")} of ${(size - 1).toLocaleString("en")} messages`;
    while (picked >= grown) picked = nodes.parent[picked];
    rebuild();
    showDetail();
    drawMap();
  }
  let playing = 0;
  function play() {
    const stop = playing || grown >= size;
    if (playing) clearInterval(playing);
    playing = 0;
    $("play").textContent = "Play";
    if (stop && grown < size) return;
    if (grown >= size) replay(2);
    $("play").textContent = "Pause";
    playing = setInterval(() => {
      replay(grown + Math.max(1, Math.round(size / 200)));
      if (grown >= size) play();
    }, 120);
  }
  function showScale() {
    const [from, to] = ends();
    $("scale-low").textContent = short(from);
    $("scale-high").textContent = short(to);
    document.querySelector(".scale i").style.background = `linear-gradient(90deg, ${tint(from)}, ${tint((from + to) / 2)}, ${tint(to)})`;
    $("colors").textContent = `${nodes.q ? "Q" : "critic's value"}, ${onScale ? "full scale" : "this tree's range"}`;
  }
  function flip() {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    drawMap();
  }
  const step = (by) => {
    const place = Math.max(0, Math.min(rows.length - 1, rows.indexOf(picked) + by));
    pick(rows[place]);
  };
  const KEYS = {
    ArrowDown: () => step(1),
    ArrowUp: () => step(-1),
    j: () => step(1),
    k: () => step(-1),
    PageDown: () => step(12),
    PageUp: () => step(-12),
    ArrowRight: () => (first[picked] < 0 ? null : open[picked] ? pick(first[picked]) : toggle(picked, true)),
    ArrowLeft: () => (open[picked] && first[picked] >= 0 ? toggle(picked, false) : picked && pick(nodes.parent[picked])),
    Home: () => pick(0),
    End: () => pick(rows[rows.length - 1]),
    Enter: () => toggle(picked),
    " ": () => toggle(picked),
    s: () => picked && pick(next[picked] >= 0 ? next[picked] : first[nodes.parent[picked]]),
    a: () => pick(data.chosen ?? 0),
    e: openAll,
    c: closeAll,
    t: flip,
    p: play,
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const place = event.target;
    // A slider, a list or a message that scrolls keeps its own keys; letters work everywhere else.
    if (place.tagName === "SELECT" || !KEYS[event.key]) return;
    if (event.key.length > 1 || event.key === " ") if (place !== document.body && place !== $("tree")) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  $("go-answer").onclick = KEYS.a;
  $("open-all").onclick = openAll;
  $("close-all").onclick = closeAll;
  $("theme").onclick = flip;

  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  $("question-text").textContent = data.question.slice(0, LONG);
  const verdict = $("verdict");
  verdict.textContent = data.answer === null ? "no answer" : `answer: ${data.answer}`;
  if (data.correct !== null) {
    verdict.classList.add(data.correct ? "good" : "bad");
    verdict.textContent += data.correct ? " ✓" : ` ✗ (reference: ${data.reference ?? "?"})`;
  }
  for (const [name, value] of data.facts) {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    $("facts").append(pair);
  }
  if (low <= high) {
    showScale();
    $("colors").disabled = !scaled;
    $("colors").onclick = () => {
      onScale = !onScale;
      showScale();
      paint();
      drawMap();
    };
  } else document.querySelector(".scale").remove();
  $("replay").max = Math.max(1, size - 1);
  $("replay").oninput = () => replay(Number($("replay").value) + 1);
  $("play").onclick = play;
  for (let i = 0; i < size; i++) open[i] = size <= 300 || onPath[i] || i === 0 ? 1 : 0;
  if (narrow()) $("question").open = false;
  replay(size);
  pick(picked);
  ready = true;
})();
