"""Before training: do rules and data fit, and what do cheats earn?

audit           golds against themselves and each other
audit_report    what an audit found, as a table
cheats          completions that deserve nothing, as data
redteam         try the cheats on a set of rules
redteam_rows    what they are tried on, and what honest tries look like
redteam_report  what came of them, as a table
"""
