// Pages that are opened from a disk may have no worker, in which the search would run: a hidden frame stands in for it.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      this.ready = new Promise((resolve) => (inside.isReady = resolve));
      inside.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.document.open();
      inside.document.write(
        `<script>postMessage = answer</script><script src="${url}"></script><script>isReady()</script>`,
      );
      inside.document.close();
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
