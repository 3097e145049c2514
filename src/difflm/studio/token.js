import { byId } from "./parts.js";

let waiting = null; // several calls may find the door closed at once: one question for all

// Ask for the token that the server was started with.
export function askToken(wrong) {
  waiting ??= new Promise((resolve) => {
    const dialog = byId("token");
    byId("token-wrong").hidden = !wrong;
    byId("token-value").value = "";
    dialog.addEventListener("cancel", (event) => event.preventDefault()); // nothing works without it
    byId("token-form").addEventListener("submit", () => {
      waiting = null;
      resolve(byId("token-value").value.trim());
    }, { once: true });
    dialog.showModal();
  });
  return waiting;
}
