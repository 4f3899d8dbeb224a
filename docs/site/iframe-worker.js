// A page that is opened from a folder may start no worker. There the search runs in a hidden frame instead: the theme asks for
// a `Worker`, and its script finds `IFrameWorker` in its parent. Where the site is served, nothing is changed.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise((resolve) => {
        document.body.append(frame)
        const inside = frame.contentWindow
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        const script = inside.document.createElement("script")
        script.src = new URL(url, document.baseURI)
        script.onload = () => resolve(inside)
        inside.document.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
