"""The report's style sheet: light and dark, wide and narrow, no font or picture from anywhere else."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --quiet: #5b6470; --paper: #ffffff; --panel: #f5f6f8; --line: #d9dde3;
  --accent: #0b6e8f; --muted: #98a2ae; --good: #1a7f4b; --bad: #b3261e; --warn: #fdf3dc; --warn-line: #d9a520; --unsure: #8a6100;
  --c0: #0b6e8f; --c1: #c2410c; --c2: #7e22ce; --c3: #15803d; --c4: #b91c5c; --c5: #8a6100; --c6: #1d4ed8; --c7: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7eaee; --quiet: #a3adb9; --paper: #14171b; --panel: #1d2228; --line: #343b44;
    --accent: #4cb8d9; --muted: #69737f; --good: #5fcf93; --bad: #ff8a80; --warn: #33290f; --warn-line: #b98d1c; --unsure: #e3c04a;
    --c0: #4cb8d9; --c1: #fb923c; --c2: #c99bff; --c3: #5fcf93; --c4: #f884b4; --c5: #e3c04a; --c6: #86a8ff; --c7: #b4bec9; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  overflow-wrap: break-word; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .75rem; padding-top: .9rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.quiet { color: var(--quiet); font-size: .92rem; }
nav { display: flex; flex-wrap: wrap; gap: .35rem 1.1rem; margin: 1rem 0 0; font-size: .95rem; }
a { color: var(--accent); text-underline-offset: .2em; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; min-width: 100%; font-size: .94rem; }
th, td { padding: .42rem .8rem .42rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
thead th { color: var(--quiet); font-weight: 500; font-size: .85rem; white-space: nowrap; vertical-align: bottom; }
tbody th { font-weight: 600; min-width: 6.5rem; }
.number + .text { padding-left: .8rem; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.passed { color: var(--good); font-weight: 600; } .missed { color: var(--bad); font-weight: 600; }
.perhaps { color: var(--unsure); font-weight: 600; }
.warnings { background: var(--warn); border-left: 4px solid var(--warn-line); padding: .7rem 1rem; margin: 1.25rem 0; }
.warnings ul { margin: .3rem 0 0; padding-left: 1.2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.25rem 2.5rem; }
figure { margin: .5rem 0; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .4rem; }
svg.chart { display: block; overflow: visible; }
svg text { fill: var(--quiet); font-size: 12.5px; font-variant-numeric: tabular-nums; }
svg .label { fill: var(--ink); }
.bar { fill: var(--accent); } .reference { fill: var(--muted); }
.whisker { stroke: var(--ink); stroke-width: 1.5; } .axis { stroke: var(--line); }
.curve { fill: none; stroke: var(--accent); stroke-width: 1.6; stroke-linejoin: round; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) minmax(0, 1fr); gap: .2rem 1rem; margin: .5rem 0; }
dt { color: var(--quiet); } dd { margin: 0; } dd dl { margin: 0 0 .4rem; }
@media (max-width: 34rem) { dl dl { grid-template-columns: 1fr; gap: 0; } dl dl dd { margin-bottom: .3rem; } }
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--accent); padding: .2rem 0; }
pre { background: var(--panel); padding: .9rem 1rem; overflow-x: auto;
  font: .86rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
.command { white-space: pre-wrap; overflow-wrap: anywhere; } .command span { display: inline-block; max-width: 100%; }
small { font-size: .8em; color: var(--quiet); font-weight: 400; } small.passed { color: var(--good); display: block; }
.answer { font-size: 1.15rem; }
.plain { list-style: none; padding: 0; margin: .5rem 0; } .plain li { margin: .25rem 0; max-width: 46rem; }
.pinned thead th:first-child, .pinned tbody th { position: sticky; left: 0; background: var(--paper); z-index: 1;
  box-shadow: 1px 0 var(--line), 0 -1px var(--line); padding-right: .6rem; }
.pinned tbody th { min-width: 7.2rem; max-width: 11rem; }
.pinned .scroll { padding-bottom: 1px; }
.pinned td, .pinned thead th + th { padding-left: .8rem; padding-right: 0; }
.pinned thead th { white-space: normal; min-width: 4.6rem; }
.pinned table { min-width: min(100%, 54rem); border-collapse: separate; border-spacing: 0; }
@media (min-width: 44rem) { .pinned tbody th { min-width: 10rem; max-width: 24rem; } }
body:has(.pinned) { max-width: 76rem; }  /* for wide tables; lines of text and plots stay as long as is readable */
body:has(.pinned) > section > :not(.pinned, h2, details), body:has(.pinned) > section > details > :not(.pinned) { max-width: 54rem; }
body:has(.pinned) > section > svg.plot { max-width: 49.4rem; }
svg.plot { margin: .5rem 1.6rem 0 3rem; width: calc(100% - 4.6rem); }
.c0 { --of: var(--c0); } .c1 { --of: var(--c1); } .c2 { --of: var(--c2); } .c3 { --of: var(--c3); }
.c4 { --of: var(--c4); } .c5 { --of: var(--c5); } .c6 { --of: var(--c6); } .c7 { --of: var(--c7); }
.fill { fill: var(--of); } .hollow { fill: var(--paper); stroke: var(--of); stroke-width: 1.8; }
.band { fill: var(--of); opacity: .13; }
.series, .front, .roof { fill: none; stroke: var(--of, var(--quiet)); stroke-width: 1.8; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.front { stroke: var(--line); stroke-width: 6; } .roof { stroke: var(--muted); }
.series.d1 { stroke-dasharray: 8 4; } .series.d2 { stroke-dasharray: 2 3; } .series.d3 { stroke-dasharray: 10 3 2 3; }
.series.d4 { stroke-dasharray: 5 2 5 6; }
.reach { stroke: var(--of); stroke-width: 1.4; } .tail { stroke-dasharray: 1.5 3; }
.guide { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 4 3; }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 3.5px; stroke-linejoin: round; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; padding: 0; margin: .4rem 0 0; font-size: .92rem; }
.legend li { display: flex; gap: .45rem; align-items: baseline; min-width: 0; overflow-wrap: anywhere; }
.legend .quiet { display: inline-block; }
.swatch { flex: none; }
.mark { padding: 0 .15em; margin-right: .1rem; border-bottom: 3px solid var(--of); }
.part { margin-right: 1.2rem; border-bottom: 4px solid var(--of); }
.over { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; margin: .6rem 0 .2rem; max-width: none;
  font-size: .9rem; line-height: 1.35; overflow-wrap: anywhere; }
.words { min-width: 13rem; white-space: pre-wrap; font-weight: 400; }
@media print { nav { display: none; } details > * { display: block; } ::details-content { content-visibility: visible; } }
"""
