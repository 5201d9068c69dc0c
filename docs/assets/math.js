// Equations, which the markdown leaves as \( .. \) and \[ .. \] in elements of class "arithmatex".
document.querySelectorAll(".arithmatex").forEach((each) => {
  const source = each.textContent.trim();
  katex.render(source.slice(2, -2), each, { displayMode: source.startsWith("\\["), throwOnError: false });
});
