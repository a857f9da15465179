"""The forms of a comparison: a table in the terminal, Markdown, CSV, JSON, and one HTML page.

    terminal.show(comparison, Console())
    markdown.render(comparison)
    tables.to_csv(comparison), tables.to_json(comparison)
    page.render(comparison)

All of them show the same figures, worded by `mp_hydra.compare.report.wording`. None of them works out a verdict.
"""
