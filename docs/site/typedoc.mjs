// The documentation site: the guides, the background pages, and the API from the sources. `npm run docs` builds it into site/.
import { existsSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const root = fileURLToPath(new URL('../..', import.meta.url))
const at = (path) => `${root}${path}`

/** The order in which a newcomer reads. */
const guide = [
  'install',
  'first-kernel',
  'lifetimes',
  'workers',
  'memory-limits',
  'placement',
  'policies',
  'leaks',
  'troubleshooting',
  'platforms',
  'runtimes',
  'bundlers',
  'cli',
  'nvidia-smi',
  'migrating',
  'rust',
  'reference',
].map((name) => at(`docs/guide/${name}.md`))

const examples = [at('examples/README.md'), at('examples/demo/README.md')]

const background = ['architecture', 'gpu', 'performance', 'reliability', 'contract', 'development']
  .map((name) => at(`docs/${name}.md`))
  .filter(existsSync)

/** @type {Partial<import('typedoc').TypeDocOptions>} */
export default {
  name: 'unimalloc',
  entryPoints: [at('index.ts')],
  tsconfig: at('tsconfig.json'),
  out: at('site'),
  readme: at('README.md'),
  projectDocuments: [...guide, ...examples, ...background],
  plugin: [fileURLToPath(new URL('plugin.mjs', import.meta.url))],
  customCss: fileURLToPath(new URL('site.css', import.meta.url)),

  markdownItLoader: keepCodeInTitles,

  // Guides first, in the order above; the API by kind and name.
  sort: ['documents-first', 'kind', 'instance-first', 'alphabetical-ignoring-documents'],
  groupOrder: [
    'Guide',
    'API',
    'Background',
    'Functions',
    'Classes',
    'Variables',
    'Namespaces',
    'Interfaces',
    'Type Aliases',
    '*',
  ],
  navigation: { includeGroups: true, includeCategories: false, includeFolders: false },
  categorizeByGroup: false,
  sidebarLinks: { GitHub: 'https://github.com/unimalloc/unimalloc', npm: 'https://www.npmjs.com/package/unimalloc' },
  highlightLanguages: ['bash', 'cpp', 'javascript', 'json', 'rust', 'toml', 'typescript'],
  lightHighlightTheme: 'github-light',
  darkHighlightTheme: 'github-dark',

  includeVersion: true,
  excludePrivate: true,
  excludeInternal: true,
  githubPages: true,
  hideGenerator: true,
  disableGit: true,
  sourceLinkTemplate: 'https://github.com/unimalloc/unimalloc/blob/main/{path}#L{line}',
  // A page that lies, or a link that leads nowhere, is no site.
  treatWarningsAsErrors: true,
  validation: { invalidLink: true, notExported: false, notDocumented: false, rewrittenLink: true },
}

/** TypeDoc makes the list of a page's headings, and their anchors, from plain text alone: code in them would be missing. */
function keepCodeInTitles(parser) {
  parser.core.ruler.push('code-in-titles', ({ tokens, Token }) => {
    tokens.forEach((token, index) => {
      if (token.type !== 'heading_open') return
      for (const part of tokens[index + 1].children) {
        if (part.type !== 'code_inline') continue
        const text = new Token('text', '', 0)
        text.content = part.content
        part.children = [text]
      }
    })
  })
}
