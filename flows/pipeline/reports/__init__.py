"""Reports for people: model cards, HTML pages, tables and figures."""
