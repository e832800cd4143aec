/* Light or dark: as the system says, until somebody chooses. */
const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
const themes = {
  chosen: null,
  apply() {
    const theme = this.chosen || (system.matches ? "dark" : "light");
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    button.textContent = theme === "dark" ? "☀" : "☾";
    button.title = button.ariaLabel = `switch to ${theme === "dark" ? "light" : "dark"} colours`;
  },
  choose(theme) {
    this.chosen = theme;
    this.apply();
  },
  toggle() {
    this.choose(root.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("hexa-theme", this.chosen); } catch { /* a page from a file may keep nothing */ }
  },
};
try { themes.chosen = localStorage.getItem("hexa-theme"); } catch { /* as above */ }
system.addEventListener("change", () => themes.apply());
document.getElementById("theme").onclick = () => themes.toggle();
themes.apply();
