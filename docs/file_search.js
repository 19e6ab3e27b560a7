// Search where the site is opened as files: browsers refuse a Worker from file://, so its script runs in a hidden frame.
// It stands for the shim that Material would fetch from the network; docs/hooks.py puts it in that place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      this.inside = new Promise((resolve) => script.addEventListener("load", () => resolve(inside)));
      script.src = url;
      frame.contentDocument.body.append(script);
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
