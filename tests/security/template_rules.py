"""Our rules for templates: pure functions from a parsed template to what is wrong with it."""

from collections.abc import Callable, Iterator

from tests.security import access_rules as access
from tests.security import data_rules as data
from tests.security.cloudformation import Template

RULES: tuple[Callable[[Template], Iterator[str]], ...] = (
    access.t1_no_way_in,
    access.t2_no_key_pairs,
    access.t3_metadata,
    access.t4_instance_role,
    access.t5_least_privilege,
    access.t6_separate_roles,
    access.t13_submitters,
    access.t13_controllers,
    access.t14_private,
    access.t17_described,
    data.t7_buckets,
    data.t7_resource_policies,
    data.t8_encryption,
    data.t9_repositories,
    data.t10_logs,
    data.t12_secrets,
    data.t15_data_stays,
    data.t16_image_builder,
)


def template_violations(template: Template) -> list[str]:
    """What is wrong with a template, each with its rule and its resource."""
    return [found for rule in RULES for found in rule(template)]
