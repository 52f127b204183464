"""Render a document as a single HTML page that loads no other file and needs no network."""

from jinja2 import Environment, StrictUndefined

from pipeline.reports.charts import draw_chart
from pipeline.reports.document import Document
from ppo_core.errors.redaction import mask_secrets

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{% if document.refresh %}
<meta http-equiv="refresh" content="{{ document.refresh }}">
{% endif %}
<title>{{ document.subject }}</title>
<style>
:root { color-scheme: light dark; --text: #1d2129; --page: #fff; --quiet: #59606b; --rule: #d9dce1;
        --line: #1f5f99; --healthy: #d8f0e0; --good: #065f46; --doubt: #8a3d0c; --bad: #991b1b;
        --box: #f4f5f7; --ins: #d5f2df; --del: #fbdfdf }
@media (prefers-color-scheme: dark) {
:root { --text: #e4e6eb; --page: #15181d; --quiet: #a4abb6; --rule: #3a404a; --line: #7fb8ee;
        --healthy: #1c3d2c; --good: #6ee7b7; --doubt: #fcd34d; --bad: #fca5a5; --box: #20242b;
        --ins: #1c4630; --del: #5a2626 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.3rem; margin-top: 3rem }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem } h4 { font-size: 1rem; margin: 1.5rem 0 .3rem }
a { color: var(--line) }
nav ul { columns: 22rem; padding-left: 1.2rem }
p, li { max-width: 48rem; overflow-wrap: anywhere }
.verdict { font-size: 1.5rem; font-weight: 600; padding: .6rem 1rem; background: var(--box);
           border-left: .4rem solid; max-width: none }
.success { color: var(--good) } .warning { color: var(--doubt) } .danger { color: var(--bad) }
.table { overflow-x: auto }
table { border-collapse: collapse }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule);
         vertical-align: top; font-variant-numeric: tabular-nums }
th { font-weight: 600; color: var(--quiet) }
td { max-width: 26rem; overflow-wrap: anywhere } td.short { white-space: nowrap }
@media (max-width: 40rem) { td { min-width: 5.5rem } td:first-child { min-width: 7.5rem } }
progress { width: 100%; accent-color: var(--line) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr));
          gap: 1.2rem; margin-bottom: 1rem }
figure { margin: 0; max-width: 440px } figcaption { overflow-wrap: anywhere }
figcaption small, .notes { color: var(--quiet); font-size: .85rem }
svg { display: block; width: 100%; height: auto; overflow: visible }
svg text { font-size: 11px; fill: var(--text) } svg .tick { fill: var(--quiet) }
svg .line { stroke: var(--line); stroke-width: 1.8; fill: none } svg .dot { fill: var(--line) }
svg .spread { fill: var(--line); opacity: .2 }
svg .grid { stroke: var(--rule) } svg .healthy { fill: var(--healthy) }
svg .half { stroke: var(--quiet); stroke-dasharray: 4 3 }
svg .warned { stroke: var(--bad); stroke-dasharray: 2 2 }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr));
           gap: .6rem }
.answers > div, .prompt, pre { background: var(--box); padding: .5rem .8rem; border-radius: 4px }
.answers { margin-top: .6rem } .notes { margin: .3rem 0 }
.text, pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
ins { background: var(--ins) } del { background: var(--del) }
</style>
</head>
<body>
<header>
<h1>{{ document.subject }}</h1>
<p class="verdict {{ document.tone }}">{{ document.verdict }}</p>
<ul>
{% for reason in document.reasons %}
<li>{{ reason }}</li>
{% endfor %}
</ul>
</header>
{% if contents %}
<nav aria-label="Contents"><ul>
{% for section in document.sections %}
<li><a href="#s{{ loop.index }}">{{ section.title }}</a></li>
{% endfor %}
</ul></nav>
{% endif %}
{% macro table(headers, rows, title) %}
<div class="table" tabindex="0" role="region" aria-label="{{ title }}"><table>
<tr>{% for header in headers %}<th scope="col">{{ header }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for cell in row %}<td{% if cell | length < 16 %} class="short"{% endif %}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}
</table></div>
{% endmacro %}
{% macro answers(reading, level) %}
<h{{ level }}>{{ reading.title }}</h{{ level }}>
<div class="prompt"><strong>Prompt</strong><div class="text">{{ reading.prompt }}</div></div>
<div class="answers">
{% for answer in reading.answers %}
<div><strong>{{ answer.title }}</strong><div class="text">
{%- for kind, text in answer.pieces -%}
{%- if kind == "added" -%}<ins>{{ text }}</ins>
{%- elif kind == "removed" -%}<del>{{ text }}</del>
{%- else -%}{{ text }}{%- endif -%}
{%- endfor -%}
{%- if not answer.pieces | join(attribute=1) %}<em>empty</em>{% endif -%}
</div></div>
{% endfor %}
</div>
{% for note in reading.notes %}
<p class="notes">{{ note }}</p>
{% endfor %}
{% endmacro %}
{% macro content(section, level) %}
{% if section.progress %}
<p><progress max="{{ section.progress.total }}" value="{{ section.progress.done }}"
             aria-label="{{ section.progress.phase }}"></progress></p>
<p>{{ section.progress.phase }}: {{ section.progress.details }}</p>
{% endif %}
{% for sentence in section.text %}
<p>{{ sentence }}</p>
{% endfor %}
{% if section.charts %}
<div class="charts">
{% for chart in section.charts %}
<figure><figcaption><strong>{{ chart.title }}</strong><br><small>{{ chart.caption }}</small>
</figcaption>{{ chart | svg }}</figure>
{% endfor %}
</div>
{% endif %}
{% if section.rows %}{{ table(section.headers, section.rows, section.title) }}{% endif %}
{% for purpose, command in section.commands %}
<p>{{ purpose }}:</p>
<pre><code>{{ command }}</code></pre>
{% endfor %}
{% for reading in section.readings %}{{ answers(reading, level) }}{% endfor %}
{% for part in section.parts %}
<h{{ level }}>{{ part.title }}</h{{ level }}>
{{ content(part, level + 1) }}
{% endfor %}
{% endmacro %}
<main>
{% for section in document.sections %}
<section>
<h2 id="s{{ loop.index }}">{{ section.title }}</h2>
{{ content(section, 3) }}
</section>
{% endfor %}
</main>
</body>
</html>
"""


def _masked(value: object) -> object:
    return mask_secrets(value) if type(value) is str else value


def document_page(document: Document) -> str:
    """Return a document as HTML with charts; all text is escaped, and secrets are masked.

    The page has a table of contents if a section has parts.
    """
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Mask before escaping: a mask over a part of the HTML could remove a tag.
        finalize=_masked,
    )
    environment.filters["svg"] = draw_chart
    return environment.from_string(TEMPLATE).render(
        document=document, contents=any(section.parts for section in document.sections)
    )
