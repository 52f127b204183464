"""Render each report as a single HTML page that loads no other file and needs no network."""

from base64 import b64encode

from jinja2 import Environment, StrictUndefined

from pipeline.reports.document import Document
from pipeline.reports.evaluation import evaluation_document
from pipeline.reports.reward_model import reward_document
from pipeline.results.evaluation import Evaluation
from pipeline.results.reward_report import RewardReport

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width">
<title>{{ document.subject }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2129; max-width: 46rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
.verdict { font-size: 1.5rem; font-weight: 600; padding: .6rem 1rem; border-left: .4rem solid }
.success { color: #065f46; background: #f0fdf4 }
.warning { color: #92400e; background: #fffbeb }
.danger { color: #991b1b; background: #fef2f2 }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid #e3e5e9;
         vertical-align: top }
th { font-weight: 600; color: #5c636d }
li, td:first-child { overflow-wrap: anywhere }
td + td { white-space: nowrap }
img { display: block; width: 600px; max-width: 100%; margin: 1rem 0 }
</style>
</head>
<body>
<h1>{{ document.subject }}</h1>
<p class="verdict {{ document.tone }}">{{ document.verdict }}</p>
<ul>
{% for reason in document.reasons %}
<li>{{ reason }}</li>
{% endfor %}
</ul>
{% for section in document.sections %}
<h2>{{ section.title }}</h2>
<table>
<tr>{% for header in section.headers %}<th>{{ header }}</th>{% endfor %}</tr>
{% for row in section.rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% for plot in section.plots %}
<img src="data:image/png;base64,{{ plot.png | base64 }}" alt="{{ plot.shows }}">
{% endfor %}
{% endfor %}
</body>
</html>
"""


def reward_model_page(report: RewardReport) -> str:
    """Return the report on a reward model as HTML with embedded figures; all text is escaped."""
    return _page(reward_document(report))


def evaluation_page(evaluation: Evaluation) -> str:
    """Return the report on an evaluation as HTML with embedded figures; all text is escaped."""
    return _page(evaluation_document(evaluation))


def _page(document: Document) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda png: b64encode(png).decode("ascii")
    return environment.from_string(TEMPLATE).render(document=document)
