// Shows where a token attends: in both models at once, for the head that is chosen in each, or the mean over heads.
"use strict";

// The (tokens x tokens) bytes of each head, decoded once.
const headsOf = (side) => side.heads ??= JSON.parse(side.dataset.weights)
  .map((text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0)));

// How much `from` attends to each token, 0 to 1; `head` counts from 1, and 0 is the mean over heads.
function attention(side, from, head, count) {
  const heads = head ? [headsOf(side)[head - 1]] : headsOf(side);
  return Array.from({ length: count }, (_, to) =>
    heads.reduce((sum, weights) => sum + weights[from * count + to], 0) / heads.length / 255);
}

for (const view of document.querySelectorAll(".attention")) {
  const sides = [...view.querySelectorAll(".side")].map((side) => ({
    side, tokens: [...side.querySelectorAll(".token")], choice: side.querySelector("select"), says: side.querySelector(".says"),
  }));
  const count = sides[0].tokens.length;
  const together = sides[0].choice.length === sides[1].choice.length; // equally many heads are compared head by head
  let chosen = Number(view.dataset.token);

  const draw = (from) => {
    for (const { side, tokens, choice, says } of sides) {
      const weights = attention(side, from, Number(choice.value), count);
      const most = Math.max(...weights) || 1;
      tokens.forEach((token, to) => {
        token.style.setProperty("--weight", `${Math.round(100 * weights[to] / most)}%`);
        token.classList.toggle("from", to === from);
        token.tabIndex = to === chosen ? 0 : -1;
      });
      const order = weights.map((_, to) => to).sort((a, b) => weights[b] - weights[a]).slice(0, 3);
      says.textContent = `${tokens[from].textContent} → ` +
        order.map((to) => `${tokens[to].textContent} ${Math.round(100 * weights[to])} %`).join(", ");
    }
  };

  for (const { tokens, choice } of sides) {
    choice.addEventListener("change", () => {
      if (together) for (const other of sides) other.choice.value = choice.value;
      draw(chosen);
    });
    tokens.forEach((token, at) => {
      const choose = () => draw(chosen = at);
      token.addEventListener("mouseenter", () => draw(at));
      token.addEventListener("mouseleave", () => draw(chosen));
      token.addEventListener("focus", choose);
      token.addEventListener("click", choose);
      token.addEventListener("keydown", (event) => {
        const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: count - 1 }[event.key];
        if (tokens[to]) {
          event.preventDefault();
          tokens[to].focus();
        }
      });
    });
  }
  // What is folded away is drawn when it is opened.
  const folded = view.closest("details");
  if (folded && !folded.open) folded.addEventListener("toggle", () => draw(chosen), { once: true });
  else draw(chosen);
}
