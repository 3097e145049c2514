import { byId, calm } from "./parts.js";

// The timeline below the texts: play button, slider, keys, and the curve of confidence.
//
// A moment is {step, t, sure}. `show(i, animate)` draws the texts at moment i.
export class Time {
  #moments = [];
  #timer = null;
  #at = 0;
  #live = false;

  constructor(show) {
    this.show = show;
    byId("play").addEventListener("click", () => this.toggle());
    byId("time").addEventListener("input", (event) => this.go(Number(event.target.value)));
    document.addEventListener("keydown", (event) => this.#key(event));
    this.#tell();
  }

  get at() {
    return this.#at;
  }

  get last() {
    return Math.max(0, this.#moments.length - 1);
  }

  get playing() {
    return this.#timer !== null;
  }

  // The texts are forming and the newest drafts are shown; whoever takes the time in hand ends that.
  set live(yes) {
    this.#live = yes;
    this.#tell();
  }

  // All moments there are; of a text in the making `steps` says how many there will be.
  load(moments, steps = moments.length) {
    this.#moments = moments;
    byId("time").max = Math.max(0, steps - 1);
    this.total = Math.max(steps, (moments.at(-1)?.step ?? -1) + 1);
    for (const id of ["curve", "played"]) byId(id).setAttribute("d", this.#curve());
  }

  // Show where the time is, without drawing.
  point(i) {
    this.#at = Math.min(this.last, Math.max(0, i));
    const moment = this.#moments[this.#at];
    const t = moment ? moment.t.toFixed(3) : "–";
    const number = moment ? moment.step + 1 : 0; // by its own step: of a long run not every one is kept
    byId("step").textContent = `${number}/${this.total}`;
    byId("t").textContent = t;
    const slider = byId("time");
    slider.value = this.#at;
    slider.setAttribute("aria-valuetext", `step ${number} of ${this.total}, t ${t}`);
    const end = Number(slider.max);
    document.documentElement.style.setProperty("--at", end ? this.#at / end : 1);
  }

  draw(i, animate = false) {
    this.point(i);
    this.show(this.#at, animate && !calm.matches);
  }

  go(i) {
    if (this.playing || this.#live) this.pause();
    this.draw(i, Math.abs(i - this.#at) === 1);
  }

  play() {
    if (this.#at >= this.last) this.draw(0);
    this.#wait();
    this.#tell();
  }

  pause() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.live = false;
  }

  toggle() {
    if (this.#live) this.go(this.#at);
    else this.playing ? this.pause() : this.play();
  }

  #wait() {
    const whole = 8000; // milliseconds from noise to text at speed 1
    const pace = Math.min(400, Math.max(40, whole / (this.last + 1)));
    this.#timer = setTimeout(() => this.#advance(), pace / Number(byId("speed").value));
  }

  #advance() {
    this.draw(this.#at + 1, true);
    if (this.#at >= this.last) this.pause();
    else this.#wait();
  }

  #tell() {
    const button = byId("play");
    const moving = this.playing || this.#live;
    button.setAttribute("aria-label", moving ? "Pause" : "Play");
    button.title = moving ? "Pause (space)" : "Play (space)";
    button.classList.toggle("playing", moving);
    byId("where").setAttribute("aria-live", moving ? "off" : "polite"); // no fifty announcements
  }

  #key(event) {
    const keys = {
      ArrowLeft: () => this.go(this.#at - 1),
      ArrowRight: () => this.go(this.#at + 1),
      Home: () => this.go(0),
      End: () => this.go(this.last),
      " ": () => this.toggle(),
    };
    const own =
      event.target.closest("select, textarea, dialog, input:not(#time)")
      || (event.key === " " && event.target.closest("button, summary, a"));
    if (own || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  #curve() {
    const end = Number(byId("time").max);
    const x = (i) => (end ? (100 * i) / end : 100);
    const points = this.#moments.map(({ sure }, i) => `L${x(i)} ${(100 * (1 - sure)).toFixed(2)}`);
    return `M0 100${points.join("")}L${x(this.last)} 100Z`;
  }
}
