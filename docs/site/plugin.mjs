// Pages are plain Markdown, as people read them on GitHub: their name is their first heading, and their group their folder.
import { Comment, CommentTag, Converter, ReflectionKind } from 'typedoc'

/** @param {import('typedoc').Application} app */
export function load(app) {
  app.converter.on(Converter.EVENT_CREATE_DOCUMENT, (_, document) => {
    document.frontmatter.group = /(?:guide|examples)\//.test(document.name) ? 'Guide' : 'Background'
    document.name = titleOf(document)
    document.content.forEach(forHighlighter)
  })
  app.converter.on(Converter.EVENT_RESOLVE_BEGIN, ({ project }) => {
    project.readme?.forEach(forHighlighter)
    // There is one entry point; `index` says nothing to a reader.
    for (const entry of project.getChildrenByKind(ReflectionKind.Module)) {
      entry.name = 'unimalloc'
      entry.comment ??= new Comment()
      entry.comment.blockTags.push(new CommentTag('@group', [{ kind: 'text', text: 'API' }]))
    }
  })
}

/** The first heading's text; code in it is a part of its own. */
function titleOf({ name, content }) {
  const [line] = content
    .map(({ text }) => text)
    .join('')
    .split('\n')
  if (!line.startsWith('# ')) throw new Error(`${name} does not start with a heading`)
  return line.slice(2).replaceAll('`', '')
}

/** Only the highlighter of TypeScript knows `using`; what names no language is no code. */
function forHighlighter(part) {
  part.text = part.text.replace(/^```c?js\n/, '```ts\n').replace(/^```\n/, '```text\n')
}
