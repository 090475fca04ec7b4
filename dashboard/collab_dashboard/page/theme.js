// Before anything is drawn: the theme this reader chose, if any.
"use strict";
try {
  const chosen = localStorage.getItem("collab-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // a browser that keeps nothing follows the system
}
