"""The report: `estimate` and `table` reduce a results file, `sections` say what it shows, `page` lays it out."""
