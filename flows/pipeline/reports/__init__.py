"""Reports for people: Metaflow cards, HTML pages, tables and figures."""
