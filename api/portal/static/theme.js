// Sets the theme before the first paint: "light", "dark", or what the system prefers.
(() => {
  try {
    const chosen = localStorage.getItem("busbar-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* storage may be off; then the system decides */ }
})();
