/* Colours for Python and CUDA: comments, preprocessor and decorators, strings, keywords, numbers, called names. */
const GRAMMARS = {
  python: /(#[^\n]*)|(^[ \t]*@[\w.]+)|("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|\b(def|return|self|None|True|False|if|else|elif|for|in|while|not|and|or|is|import|from|as|class|with|del|lambda|torch)\b|\b(\d[\w.]*)\b|\b([A-Za-z_]\w*)(?=\()/gm,
  cuda: /(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|(^[ \t]*#[^\n]*)|("(?:[^"\\]|\\.)*")|\b(template|typename|using|namespace|struct|class|static_assert|constexpr|const|static|inline|void|bool|int|float|double|long|char|short|unsigned|auto|if|else|for|while|do|return|switch|case|break|continue|true|false|extern|__global__|__device__|__grid_constant__|__launch_bounds__|__shared__|__forceinline__|public|private|enum|sizeof|asm|volatile)\b|\b(\d[\w.]*)\b|\b([A-Za-z_]\w*)(?=\()/gm,
};

/** The text in spans, in a fragment. */
function highlighted(text, language) {
  const made = document.createDocumentFragment();
  let at = 0;
  for (const found of text.matchAll(GRAMMARS[language])) {
    const span = document.createElement("span");
    span.textContent = found[0];
    span.className = `tok-${"cpsknf"[found.slice(1).findIndex(group => group !== undefined)]}`;
    made.append(text.slice(at, found.index), span);
    at = found.index + found[0].length;
  }
  made.append(text.slice(at));
  return made;
}
