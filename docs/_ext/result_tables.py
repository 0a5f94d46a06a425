"""The tables in the Markdown of benchmarks/results."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip('|').split('|')]


def table_of(text: str, section: str) -> list[list[str]]:
    """The first table below a heading, its head first."""
    lines = text.splitlines()
    if f'## {section}' not in lines:
        raise ValueError(f'no section {section!r}')
    rows: list[list[str]] = []
    for line in lines[lines.index(f'## {section}') + 1 :]:
        if line.startswith('|'):
            rows.append(cells(line))
        elif rows or line.startswith('## '):
            break
    if len(rows) < 3:
        raise ValueError(f'no table in section {section!r}')
    return [rows[0], *rows[2:]]


def chosen(table: list[list[str]], columns: list[str], rows: list[str]) -> list[list[str]]:
    """Some columns and rows of a table; it has to have all of them."""
    head, *body = table
    places = [head.index(column) for column in columns] if columns else range(len(head))
    for start in rows:
        if not any(cell.startswith(start) for row in body for cell in row):
            raise ValueError(f'no row {start!r}')
    kept = [
        row for row in body
        if not rows or any(cell.startswith(start) for cell in row for start in rows)
    ]  # fmt: skip
    return [[row[k] for k in places] for row in [head, *kept]]
