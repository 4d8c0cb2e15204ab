"""What goes together and what does not: one table of rules, each with its public source.

`record` has the words (`Deployment`, `Rule`, `Finding`), the other files hold the rules by topic, `table` puts them
together and applies them. Pure: no files, no machine, no engine; a rule judges values that it is given.
"""
