"""Reports: charts, tables, one offline page and a live terminal display, all from plain rows. Knows no model."""
