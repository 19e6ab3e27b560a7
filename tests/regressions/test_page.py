"""The page of the server under overload, its script run by Node in a document of a few lines."""

import json
import re
import shutil
import subprocess
import threading

import numpy as np
import pytest
from bombs import save_mask
from serving import ask, infer_binary, process

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("node") is None, reason="the page's script needs Node")]

# As much of a document as the page uses. After SECONDS it prints what can be read on the page.
DOCUMENT = """
const made = {};
class Element {
  constructor(tag) {
    Object.assign(this, { tag, attributes: {}, children: [], style: {}, dataset: {}, words: "", files: [] });
    Object.assign(this, { clientWidth: 600, clientHeight: 200, className: "" });
    this.classList = { contains: (n) => this.className.includes(n), add() {}, remove() {}, toggle() {} };
  }
  get value() { return this.given ?? this.children[0]?.attributes.value ?? ""; }
  set value(text) { this.given = text; }
  get textContent() { return this.words + this.children.map((c) => c.textContent ?? c).join(" "); }
  set textContent(text) { this.words = text; this.children = []; }
  get firstChild() { return this.children[0]; }
  get tBodies() { return [this]; }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.words = ""; this.children = parts; }
  addEventListener() {}
  contains() { return false; }
  querySelector() { return null; }
  querySelectorAll() { return []; }
  all(tag) { return this.children.flatMap((c) => c.all ? [...(c.tag === tag ? [c] : []), ...c.all(tag)] : []); }
}
globalThis.document = {
  getElementById: (id) => made[id] ??= new Element(id),
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  querySelector: () => new Element("none"), addEventListener() {}, hidden: false,
  querySelectorAll: (what) => what === ".over" ? [document.getElementById("over")] : [],
};
globalThis.addEventListener = () => {};
globalThis.CSS = { escape: (text) => text };
const real = fetch;
globalThis.fetch = (path, rest) => real(process.argv[2] + path, rest);
setTimeout(() => {
  const axis = made.latency.all("text").filter((t) => t.attributes["text-anchor"] === "end").map((t) => t.textContent);
  console.log(JSON.stringify({
    axis: axis.filter((words) => words !== "now"),
    state: (made["state-words"] ?? made.state).textContent,
    over: made.over?.textContent ?? "",
  }));
  process.exit(0);
}, 3000);
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the page shows of a server with a target of 20 ms that needs much longer, and its slowest second's p99."""
    folder, side, stop = tmp_path_factory.mktemp("page"), 200, threading.Event()

    def load(port, deadline_ms):
        """With their own long deadline requests are answered, late by the target; without, they are refused."""
        while not stop.is_set():
            infer_binary(port, np.zeros((1, 3, side, side), np.uint8), "mask", binary_data_output=True, **deadline_ms)

    model = save_mask(folder / "mask.apm", depth=24)
    with process(model, "--slo", "20ms", "--bits", "8", "--max-batch", "1") as (_, port):
        kinds = [{"deadline_ms": 60_000}] * 4 + [{}] * 2
        threads = [threading.Thread(target=load, args=(port, kind)) for kind in kinds]
        for thread in threads:
            thread.start()
        try:
            page = ask(port, "GET", "/").body.decode()
            script = re.search(r'src="([^"]+\.js)"', page)[1]
            (folder / "page.cjs").write_text(DOCUMENT + ask(port, "GET", "/" + script.lstrip("/")).body.decode())
            threading.Event().wait(5)
            done = subprocess.run(
                ["node", folder / "page.cjs", f"http://127.0.0.1:{port}"], capture_output=True, text=True, timeout=30
            )
            live = ask(port, "GET", "/v2/models/mask/live?seconds=8").json
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), max(second["p99_ms"] or 0 for second in live["seconds"])


def test_the_latency_axis_reaches_what_happened(seen):
    """It was cut at four times the target, without a mark: p99 lay flat at 80 ms."""
    page, p99_ms = seen
    top_ms = max(1000 * float(words[:-2]) if words.endswith(" s") else float(words) for words in page["axis"])
    assert p99_ms > 100 and top_ms >= 0.9 * p99_ms, f"p99 {p99_ms:.0f} ms, the axis ends at {top_ms:.0f} ms"


def test_an_overload_is_said(seen):
    """The page said "ready, N waiting" in grey, whatever share was in time."""
    assert "overloaded" in seen[0]["state"], seen[0]["state"]


def test_tiles_say_of_which_window_they_are(seen):
    """Each was of a window of its own, unstated: they contradicted each other."""
    assert seen[0]["over"] == "last 10 s"
