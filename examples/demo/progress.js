// A progress bar for work that takes longer than a second. It draws on stderr, and only on a terminal.
import { SingleBar, Presets } from 'cli-progress'

const patience = 1000

/** @param {string} label */
export function progress(label) {
  const started = performance.now()
  /** @type {SingleBar | null} */
  let bar = null
  return {
    /** @param {number} fraction */
    update(fraction) {
      if (!bar && process.stderr.isTTY && performance.now() - started > patience && fraction < 1) {
        bar = new SingleBar(
          { format: `{bar} {percentage} %  ${label}`, clearOnComplete: true, hideCursor: true },
          Presets.shades_classic,
        )
        bar.start(100, 0)
      }
      // The filters do not yield to the event loop, so the bar's own timer never fires: draw at once.
      bar?.update(Math.floor(fraction * 100))
      bar?.render()
    },
    stop() {
      bar?.stop()
    },
  }
}
