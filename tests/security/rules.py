"""Our own security rules, T1 to T17. Pure: a template or a request in, what is wrong with it out.

| rule | about | over |
|---|---|---|
| T1 | no way in from any address; no port 22 | templates |
| T2 | no key pairs | templates, launch templates, compute environments |
| T3 | instance metadata: version 2, one hop, no tags | templates, launch templates |
| T4 | the instance's role: the ECS agent and Session Manager; jobs do not reach it | both |
| T5 | least privilege; PassRole of named roles to a named service | templates, capabilities |
| T6 | one role, one purpose; trust with aws:SourceAccount and aws:SourceArn | both |
| T7 | buckets: private, versioned, KMS, TLS only, logged; nothing for everyone | templates |
| T8 | disks and file systems encrypted; file systems with groups and ports of their own | both |
| T9 | repositories scanned, immutable, KMS; images by digest | both |
| T10 | logs: retention and KMS; keys rotated; flow logs | templates |
| T11 | containers: init, no root by name, host paths, devices, retry rules | requests |
| T12 | no secrets in clear | both |
| T13 | submitters: Deny by privileged, user, image; cancel by tag; controllers: less | both |
| T14 | private subnets, HTTPS only; launch templates and parents of AMIs pinned | both |
| T15 | maxvCpus bounded, budget, data outlives its stack | both |
| T16 | AMI builds: steps in the template, tests, package list; no secret in user data | both |
| T17 | every action exists (cfn-lint W3037); everything described | templates |

What they leave out: docs/decisions/015-template-rules-left-out.md.
"""

from tests.security.request_rules import request_violations
from tests.security.template_rules import template_violations

__all__ = ["request_violations", "template_violations"]
