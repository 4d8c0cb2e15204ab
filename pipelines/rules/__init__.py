"""Rules on which settings can be combined: one table, with a public source for each rule.

`record` defines the terms (`Deployment`, `Rule`, `Finding`), the other files hold the rules by topic, `table` collects
and applies them. Pure: no files, no machine, no engine; a rule only judges the values it is given.
"""
