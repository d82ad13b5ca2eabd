"""Reports: page, charts, tables, sentences, intervals and palette, made from plain records."""
