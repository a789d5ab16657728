"""Model-written Python, shut in.

api        programs and suites of tests, run at the best level there is
cases      the tests column
client     the near end of a server
server     forks, watches and ends processes
processes  forked, measured, ended with all descendants
child      from fork to the first hostile line
roles      program, candidate, tests
link       two interpreters in conversation
values     values between them
kernel     system calls that Python has no call for
seccomp    which system calls are allowed
landlock   which files may be opened
"""
