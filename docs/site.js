// The theme's buttons are labels of hidden inputs, which a keyboard cannot reach. Escape closes the drawer.
document.addEventListener("DOMContentLoaded", () => {
  const labels = document.querySelectorAll("label.md-header__button[for], label.md-nav__title[for], label.md-nav__link[for]");
  const names = { __drawer: "Navigation", __search: "Search" };
  for (const label of labels) {
    label.tabIndex = 0;
    label.setAttribute("role", "button");
    if (!label.textContent.trim()) label.setAttribute("aria-label", names[label.htmlFor] ?? label.title);
    label.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      event.stopImmediatePropagation();
      label.click();
      if (label.htmlFor === "__search") document.querySelector(".md-search__input").focus();
      // The label of the other colors takes this one's place.
      if (label.hidden) label.parentElement.querySelector("label:not([hidden])").focus();
    });
  }
  for (const radio of document.querySelectorAll(".md-option")) radio.tabIndex = -1;
  document.addEventListener("keydown", (event) => {
    const drawer = document.getElementById("__drawer");
    if (event.key !== "Escape" || !drawer.checked) return;
    drawer.click();
    document.querySelector("label.md-header__button[for=__drawer]").focus();
  });
});
