import { byId } from "./parts.js";

let waiting = null; // several calls may find the door closed at once: one question for all

function stay(event) {
  event.preventDefault(); // Escape would close the dialog, and nothing works without a token
}

// Ask for the token that the server was started with.
export function askToken(wrong) {
  waiting ??= new Promise((resolve) => {
    const dialog = byId("token");
    byId("token-wrong").hidden = !wrong;
    byId("token-value").value = "";
    dialog.addEventListener("cancel", stay);
    byId("token-form").addEventListener("submit", () => {
      waiting = null;
      resolve(byId("token-value").value.trim());
    }, { once: true });
    dialog.showModal();
  });
  return waiting;
}
