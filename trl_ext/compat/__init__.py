"""Everything that we hold on to in other projects: the versions that work, the table of seams, and one file a project.

The only room that asks for a version.
"""
