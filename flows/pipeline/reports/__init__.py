"""What people look at: cards, pages, tables and figures."""
