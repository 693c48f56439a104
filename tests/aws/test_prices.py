"""Prices: asked of clients whose requests botocore's own model judges, answered as AWS does."""

import json
import stat
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

import boto3
import pytest
from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.config import Config
from botocore.exceptions import ConnectTimeoutError
from hypothesis import given
from hypothesis import strategies as st

from batchml.aws.pricing.cache import FRESH, Prices
from batchml.aws.pricing.price_list import CHARGES, Charge, find_price, plan_queries
from batchml.aws.pricing.prices import InstanceType
from batchml.aws.session import Access, Session
from batchml.local.server.protocol import problems
from tests.support.fakes import FakeClock

NOW = 1_795_276_800.0  # 2026-11-21T16:00:00Z
DAY = 86_400


class Raw:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self) -> list[bytes]:
        return [self._body]


class Aws:
    """Real clients, sending nothing: their requests are checked, and answered from here."""

    def __init__(self) -> None:
        self.products: list[str] = []
        self.spot: list[dict[str, str]] = []
        self.types: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.regions: set[tuple[str, str]] = set()
        self.denied: set[str] = set()
        self.refuses_any_of = False
        self.ignores_any_of = False
        self.failure: tuple[int, str] | None = None
        self.is_down = False
        self.down_after = 99  # calls
        self.page = 100
        self._clients: dict[tuple[str, str], Any] = {}

    def client(self, service: str, attempts: int = 5, region: str = "") -> Any:
        where = region or "eu-west-1"
        self.regions.add((service, where))
        if (service, where) not in self._clients:
            made = boto3.client(
                service, region_name=where, aws_access_key_id="k", aws_secret_access_key="s",
                config=Config(retries={"total_max_attempts": 1, "mode": "standard"}),
            )  # fmt: skip
            made.meta.events.register("provide-client-params.*.*", self._check)
            made.meta.events.register("before-send.*.*", self._send)
            self._clients[service, where] = made
        return self._clients[service, where]

    def _check(self, params: dict[str, Any], model: Any, **_: Any) -> None:
        assert list(problems(model.input_shape, params, strict=True)) == []
        self.calls.append(model.name)
        self.requests.append(params)

    def _send(self, request: Any, event_name: str, **_: Any) -> AWSResponse:
        if self.is_down or len(self.calls) > self.down_after:
            raise ConnectTimeoutError(endpoint_url=request.url)
        operation = event_name.rpartition(".")[2]
        answers: dict[str, Callable[[Any], tuple[int, str]]] = {
            "GetProducts": self._get_products,
            "DescribeSpotPriceHistory": self._describe_spot,
            "DescribeInstanceTypes": self._describe_types,
        }
        status, body = answers[operation](request.body)
        return AWSResponse(request.url, status, HeadersDict({}), Raw(body.encode()))

    def _get_products(self, body: bytes) -> tuple[int, str]:
        if "GetProducts" in self.denied:
            text = "User: arn:aws:iam::1:user/u is not authorized to perform: pricing:GetProducts"
            return 400, json.dumps({"__type": "AccessDeniedException", "Message": text})
        if self.failure:
            return self.failure[0], json.dumps({"__type": self.failure[1], "message": "m"})
        asked = json.loads(body)
        filters = asked["Filters"]
        if self.refuses_any_of and any(each["Type"] == "ANY_OF" for each in filters):
            return 400, json.dumps({"__type": "InvalidParameterException", "message": "ANY_OF"})
        found = [
            text for text in self.products if self._matches(asked["ServiceCode"], text, filters)
        ]
        start = int(asked.get("NextToken", 0))
        end = start + self.page
        answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": found[start:end]}
        return 200, json.dumps(answer | ({"NextToken": str(end)} if end < len(found) else {}))

    def _matches(self, service: str, text: str, filters: list[dict[str, str]]) -> bool:
        if '"serviceCode"' not in text:  # damage is sent to everyone
            return True
        read = json.loads(text)
        known = read["product"]["attributes"] | {"productFamily": read["product"]["productFamily"]}
        return read["serviceCode"] == service and all(
            known.get(each["Field"], "")
            in (
                each["Value"].split(",")
                if each["Type"] == "ANY_OF" and not self.ignores_any_of
                else [each["Value"]]
            )
            for each in filters
        )

    def _describe_spot(self, body: dict[str, str]) -> tuple[int, str]:
        if "DescribeSpotPriceHistory" in self.denied:
            return 403, ec2_error("UnauthorizedOperation")
        asked = {value for key, value in fields(body).items() if key.startswith("InstanceType")}
        found = [entry for entry in self.spot if entry["instanceType"] in asked]
        return 200, ec2_answer("DescribeSpotPriceHistory", "spotPriceHistorySet", found)

    def _describe_types(self, body: dict[str, str]) -> tuple[int, str]:
        if "DescribeInstanceTypes" in self.denied:
            return 403, ec2_error("UnauthorizedOperation")
        asked = [value for key, value in fields(body).items() if ".Value." in key]
        found = [
            each
            for each in self.types
            for pattern in asked
            if each["instanceType"] == pattern
            or (pattern.endswith(".*") and each["instanceType"].startswith(pattern[:-1]))
        ]
        return 200, ec2_answer("DescribeInstanceTypes", "instanceTypeSet", found)


def fields(body: Any) -> dict[str, str]:
    if isinstance(body, dict):
        return body
    return dict(parse_qsl(body.decode() if isinstance(body, bytes) else body))


def xml(value: Any) -> str:
    if isinstance(value, list):
        return "".join(f"<item>{xml(each)}</item>" for each in value)
    if isinstance(value, dict):
        return "".join(f"<{key}>{xml(each)}</{key}>" for key, each in value.items())
    return escape(str(value))


def ec2_answer(operation: str, name: str, found: list[Any]) -> str:
    space = "http://ec2.amazonaws.com/doc/2016-11-15/"
    inner = f"<requestId>r</requestId><{name}>{xml(found)}</{name}>"
    return f'<{operation}Response xmlns="{space}">{inner}</{operation}Response>'


def ec2_error(code: str) -> str:
    inner = f"<Error><Code>{code}</Code><Message>You are not authorized.</Message></Error>"
    return f"<Response><Errors>{inner}</Errors><RequestID>r</RequestID></Response>"


def product(
    usd: str, unit: str = "Hrs", *, service: str = "AmazonEC2", family: str = "Compute Instance",
    since: str = "2026-10-01T00:00:00Z", tiers: dict[str, str] | None = None,
    older: dict[str, str] | None = None, **attributes: str,
) -> str:  # fmt: skip
    """One item of a PriceList: a JSON text, as AWS sends it."""
    terms = {}
    past = {day: {"0": amount} for day, amount in (older or {}).items()}
    for place, (date, amounts) in enumerate({since: tiers or {"0": usd}, **past}.items()):
        terms[f"SKU.JRTCKXETXF{place}"] = {
            "sku": "SKU",
            "offerTermCode": "JRTCKXETXF",
            "effectiveDate": date,
            "termAttributes": {},
            "priceDimensions": {
                f"SKU.JRTCKXETXF.{begin}": {
                    "unit": unit,
                    "beginRange": begin,
                    "endRange": "Inf",
                    "description": "",
                    "appliesTo": [],
                    "rateCode": "SKU.JRTCKXETXF.6YS6EN2CT7",
                    "pricePerUnit": {"USD": amount},
                }
                for begin, amount in amounts.items()
            },
        }
    return json.dumps({
        "product": {
            "productFamily": family,
            "sku": "SKU",
            "attributes": {"regionCode": "eu-west-1", **attributes},
        },
        "serviceCode": service,
        "terms": {"OnDemand": terms},
        "version": "20261101000000",
        "publicationDate": "2026-11-01T00:00:00Z",
    })  # fmt: skip


def machine(name: str, usd: str, unit: str = "Hrs", **more: Any) -> str:
    attributes = {
        "instanceType": name, "operatingSystem": "Linux", "tenancy": "Shared",
        "preInstalledSw": "NA", "capacitystatus": "Used", "usagetype": f"EUW1-BoxUsage:{name}",
        "marketoption": "OnDemand",
    }  # fmt: skip
    return product(usd, unit, **(attributes | more))


def info(name: str, vcpus: int, gpus: int = 0, arch: str = "x86_64") -> dict[str, Any]:
    gpu = {"gpuInfo": {"gpus": [{"name": "A10G", "manufacturer": "NVIDIA", "count": gpus}]}}
    return {
        "instanceType": name,
        "vCpuInfo": {"defaultVCpus": vcpus},
        "memoryInfo": {"sizeInMiB": vcpus * 4096},
        "processorInfo": {"supportedArchitectures": [arch]},
        **(gpu if gpus else {}),
    }


def spot(name: str, zone: str, usd: str, at: str) -> dict[str, str]:
    return {
        "instanceType": name, "productDescription": "Linux/UNIX", "spotPrice": usd,
        "timestamp": at, "availabilityZone": zone,
    }  # fmt: skip


NETWORK = [
    product("0.048", family="NAT Gateway", usagetype="EU-NatGateway-Hours"),
    product("0.052", "GB", family="NAT Gateway", usagetype="EU-NatGateway-Bytes"),
    product("0.099", family="NAT Gateway", usagetype="EU-RegionalNatGateway-Hours"),
    product("0.088", "GB-Mo", family="Storage", usagetype="EU-EBS:VolumeUsage.gp3",
            volumeApiName="gp3"),
    product("0.11", "GB-Mo", family="Storage", usagetype="EU-EBS:VolumeUsage.gp2",
            volumeApiName="gp2"),
    product("0.005", service="AmazonVPC", family="", group="VPCPublicIPv4Address",
            usagetype="EU-PublicIPv4:InUseAddress"),
    product("0.006", service="AmazonVPC", family="", group="VPCPublicIPv4Address",
            usagetype="EU-PublicIPv4:IdleAddress"),
    product("0.011", service="AmazonVPC", family="VpcEndpoint", usagetype="EU-VpcEndpoint-Hours"),
    product("0.012", service="AmazonVPC", family="VpcEndpoint",
            usagetype="EU-VpcEndpoint-GWLBE-Hours"),
    product("0.33", "GB-Mo", service="AmazonEFS", family="Storage",
            storageClass="General Purpose", usagetype="EU-TimedStorage-ByteHrs"),
    product("0.05", "GB", service="AmazonEFS", family="Storage",
            storageClass="General Purpose", usagetype="EU-ETDataAccess-Bytes"),
    *(
        product(usd, "GB-Mo", service="AmazonFSx", family="Storage", fileSystemType="Lustre",
                storageType="SSD", throughputCapacity=speed, usagetype=f"EU-Storage.SSD.{speed}")
        for speed, usd in (("125", "0.16"), ("250", "0.23"), ("1000", "0.66"), ("100", "0.2"),
                           ("1250", "9"))
    ),
    product("1.0000000000", "Keys", service="awskms", family="Encryption Key",
            usagetype="eu-west-1-KMS-Keys"),
    product("0", "GB", service="AmazonCloudWatch", family="Data Payload",
            usagetype="EU-DataProcessing-Bytes", tiers={"0": "0", "5": "0.57"}),
]  # fmt: skip

EXPECTED = {
    "nat-hour": "0.048", "nat-gb": "0.052", "gp3-gb-month": "0.088", "ipv4-hour": "0.005",
    "endpoint-hour": "0.011", "efs-gb-month": "0.33", "fsx-125-gb-month": "0.16",
    "fsx-250-gb-month": "0.23", "fsx-1000-gb-month": "0.66", "kms-key-month": "1.0000000000",
    "logs-gb": "0.57",
}  # fmt: skip


@pytest.fixture(scope="module")
def clients() -> Aws:
    """Making a client of EC2 takes a second; one set will do."""
    return Aws()


@pytest.fixture
def aws(clients: Aws) -> Iterator[Aws]:
    kept = clients._clients
    clients.__init__()  # type: ignore[misc]
    clients._clients = kept
    yield clients


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def make(aws: Aws, clock: FakeClock, tmp_path: Path) -> Callable[[], Prices]:
    """Another process of ours: same cache file, nothing in memory."""
    return lambda: Prices(aws, tmp_path / "cache" / "prices.json", clock)


Make = Callable[[], Prices]


# --- the Price List -------------------------------------------------------------------------


def test_every_charge_is_told_from_those_beside_it(aws: Aws, make: Make) -> None:
    aws.products = NETWORK
    book = make().ask("eu-west-1", EXPECTED)
    assert {item: str(price.low) for item, price in book.prices.items()} == EXPECTED
    assert (book.unknown, book.notes) == ({}, ())
    assert set(EXPECTED) == set(CHARGES) - {"fsx-500-gb-month"}
    price = book.prices["nat-hour"]
    assert (price.date, price.since, price.per) == ("2026-11-21", "2026-10-01", "hour")


def test_few_calls_answer_for_much(aws: Aws, make: Make) -> None:
    aws.products = NETWORK + [machine(f"g5.{size}xlarge", str(size)) for size in range(1, 41)]
    machines = [f"on-demand:g5.{size}xlarge" for size in range(1, 41)]
    usual = ["nat-hour", "nat-gb", "gp3-gb-month", "ipv4-hour", "efs-gb-month", "kms-key-month"]
    book = make().ask("eu-west-1", [*usual, "logs-gb", *machines])
    assert not book.unknown
    assert aws.calls == ["GetProducts"] * 6
    assert aws.regions == {("pricing", "us-east-1")}


def test_pages_are_followed(aws: Aws, make: Make) -> None:
    aws.page = 2
    aws.products = [machine(f"g5.{size}xlarge", str(size)) for size in range(1, 6)]
    book = make().ask("eu-west-1", [f"on-demand:g5.{size}xlarge" for size in range(1, 6)])
    assert [int(price.low) for price in book.prices.values()] == [1, 2, 3, 4, 5]
    assert aws.calls == ["GetProducts"] * 3


def test_names_that_do_not_fit_one_filter_make_another_question() -> None:
    items = [f"on-demand:g5.{number}xlarge" for number in range(100)]
    asked = plan_queries("eu-west-1", items)
    assert [item for query in asked for item in query.items] == items
    values = [query.request()["Filters"][0]["Value"] for query in asked]
    assert len(values) == 2 and max(map(len, values)) <= 1024


@pytest.mark.parametrize("fault", ["refuses_any_of", "ignores_any_of"])
def test_values_are_asked_one_by_one_where_any_of_is_not_understood(
    aws: Aws, make: Make, fault: str
) -> None:
    setattr(aws, fault, True)
    aws.products = [machine("g5.xlarge", "1.1"), machine("g6.xlarge", "0.9")]
    book = make().ask("eu-west-1", ["on-demand:g5.xlarge", "on-demand:g6.xlarge"])
    assert sorted(price.low for price in book.prices.values()) == [Decimal("0.9"), Decimal("1.1")]
    assert aws.calls == ["GetProducts"] * 3


def test_free_products_reservations_and_other_markets_are_no_price(aws: Aws, make: Make) -> None:
    aws.products = [
        machine("g5.xlarge", "0.0000000000"),
        machine("g5.xlarge", "7", usagetype="EUW1-UnusedBox:g5.xlarge"),
        machine("g5.xlarge", "8", marketoption="CapacityBlock"),
        machine("g5.xlarge", "9", "Quantity"),
        machine("g5.xlarge", "1.123"),
        "no json",
        '{"product": 5}',
        "[]",
    ]
    book = make().ask("eu-west-1", ["on-demand:g5.xlarge"])
    assert book.prices["on-demand:g5.xlarge"].low == Decimal("1.123")


def test_the_newest_term_that_has_begun_holds(aws: Aws, make: Make) -> None:
    dates = {"2025-01-01T00:00:00Z": "3", "2026-12-01T00:00:00Z": "1"}
    aws.products = [machine("g5.xlarge", "2", older=dates)]
    price = make().ask("eu-west-1", ["on-demand:g5.xlarge"]).prices["on-demand:g5.xlarge"]
    assert (price.low, price.since) == (Decimal(2), "2026-10-01")


def test_of_tiers_the_first_that_is_not_free_holds(aws: Aws, make: Make) -> None:
    tiers = {"1024": "3", "0": "0", "10": "5"}
    aws.products = [machine("g5.xlarge", "", tiers=tiers)]
    book = make().ask("eu-west-1", ["on-demand:g5.xlarge"])
    assert book.prices["on-demand:g5.xlarge"].low == 5


def test_two_prices_that_fit_are_none(aws: Aws, make: Make) -> None:
    aws.products = [machine("g5.xlarge", "2"), machine("g5.xlarge", "1.50")]
    book = make().ask("eu-west-1", ["on-demand:g5.xlarge"])
    assert not book.prices
    assert "several prices ($1.5, $2)" in book.unknown["on-demand:g5.xlarge"]


def test_two_products_of_one_price_are_that_price(aws: Aws, make: Make) -> None:
    aws.products = [machine("g5.xlarge", "2.0"), machine("g5.xlarge", "2.00")]
    assert make().ask("eu-west-1", ["on-demand:g5.xlarge"]).prices


def test_what_aws_does_not_list_is_unknown(aws: Aws, make: Make) -> None:
    yuan = machine("g5.xlarge", "2").replace('"USD"', '"CNY"')
    aws.products = [yuan]
    book = make().ask("eu-west-1", ["on-demand:g5.xlarge"])
    assert (book.prices, list(book.unknown)) == ({}, ["on-demand:g5.xlarge"])
    assert "no price in US dollars" in book.unknown["on-demand:g5.xlarge"]


@pytest.mark.parametrize("region", ["cn-north-1", "us-gov-west-1", "us-iso-east-1"])
def test_other_partitions_have_no_price_list(aws: Aws, make: Make, region: str) -> None:
    book = make().ask(region, ["nat-hour"])
    assert region in book.unknown["nat-hour"]
    assert aws.calls == []


@given(st.recursive(
    st.none() | st.booleans() | st.text(max_size=9) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["product", "attributes", "terms", "OnDemand", "priceDimensions", "unit",
                         "pricePerUnit", "USD", "effectiveDate", "beginRange", "x"]),
        inner, max_size=4), max_leaves=20))  # fmt: skip
def test_no_answer_breaks_the_reading(value: Any) -> None:
    anything = Charge("", "s", "f", "v", "", "", "hour")
    found = find_price(anything, [json.dumps(value)], "2026-11-21T00:00:00Z")
    assert isinstance(found, str) or found[0] > 0


# --- spot -----------------------------------------------------------------------------------


def test_spot_is_the_newest_price_of_each_zone(aws: Aws, make: Make) -> None:
    aws.spot = [
        spot("g5.xlarge", "eu-west-1a", "0.40", "2026-11-20T10:00:00Z"),  # before StartTime
        spot("g5.xlarge", "eu-west-1b", "0.55", "2026-11-21T09:00:00Z"),
        spot("g5.xlarge", "eu-west-1b", "0.90", "2026-11-19T09:00:00Z"),
        spot("g5.xlarge", "eu-west-1a", "0.10", "2026-11-21T16:00:01Z"),  # has not begun
        spot("g5.xlarge", "eu-west-1a", "0.20", "2026-11-01T10:00:00Z"),
        spot("g5.xlarge", "eu-west-1c", "0", "2026-11-21T09:00:00Z"),
        spot("g6.xlarge", "eu-west-1a", "0.30", "2026-11-01T10:00:00Z"),
    ]
    book = make().ask("eu-west-1", ["spot:g5.xlarge", "spot:g6.xlarge", "spot:p5.48xlarge"])
    price = book.prices["spot:g5.xlarge"]
    assert (price.low, price.high) == (Decimal("0.40"), Decimal("0.55"))
    assert (price.since, price.source) == ("2026-11-21", "EC2 spot")
    assert book.prices["spot:g6.xlarge"].low == Decimal("0.30")
    assert "no spot price" in book.unknown["spot:p5.48xlarge"]
    assert aws.calls == ["DescribeSpotPriceHistory"]
    assert aws.regions == {("ec2", "eu-west-1")}
    assert aws.requests[0]["StartTime"] == aws.requests[0]["EndTime"] == int(NOW)


def test_a_spot_price_is_good_for_an_hour(aws: Aws, make: Make, clock: FakeClock) -> None:
    aws.spot = [spot("g5.xlarge", "eu-west-1a", "0.40", "2026-11-20T10:00:00Z")]
    for seconds, calls in ((0, 1), (3_600, 1), (1, 2)):
        clock.time += seconds
        make().ask("eu-west-1", ["spot:g5.xlarge"])
        assert len(aws.calls) == calls


# --- instance types -------------------------------------------------------------------------


def test_a_family_is_all_its_sizes_and_no_other_family(aws: Aws, make: Make) -> None:
    aws.types = [
        info("g5.12xlarge", 48, 4), info("g5.xlarge", 4, 1), info("g5g.xlarge", 4, 1, "arm64"),
        info("c7g.large", 2, 0, "arm64"), info("p4d.24xlarge", 96, 8), info("g99.x", 1),
    ]  # fmt: skip
    found = make().instances("eu-west-1", ["g5", "c7g.large", "h1", "optimal"])
    assert found.types == {
        "g5": (
            InstanceType("g5.xlarge", 4, 16_384, 1, "x86_64"),
            InstanceType("g5.12xlarge", 48, 196_608, 4, "x86_64"),
        ),
        "c7g.large": (InstanceType("c7g.large", 2, 8_192, 0, "arm64"),),
    }
    assert found.unknown == {
        "optimal": "AWS Batch chooses the instance types itself",
        "h1": "eu-west-1 has no such instance type",
    }
    assert aws.calls == ["DescribeInstanceTypes"]
    make().instances("eu-west-1", ["g5", "c7g.large"])
    assert aws.calls == ["DescribeInstanceTypes"]
    make().instances("us-east-1", ["g5"])
    assert len(aws.calls) == 2


def test_gpus_of_others_are_not_counted(aws: Aws, make: Make) -> None:
    entry = info("g4ad.xlarge", 4, 1)
    entry["gpuInfo"]["gpus"][0]["manufacturer"] = "AMD"
    aws.types = [entry]
    assert make().instances("eu-west-1", ["g4ad"]).types["g4ad"][0].gpus == 0


def test_types_that_may_not_be_asked_about_are_unknown(aws: Aws, make: Make) -> None:
    aws.denied = {"DescribeInstanceTypes"}
    found = make().instances("eu-west-1", ["g5"])
    assert found.types == {}
    assert found.unknown == {"g5": "ec2:DescribeInstanceTypes is not allowed"}


def test_types_of_long_ago_do_when_aws_does_not_answer(
    aws: Aws, make: Make, clock: FakeClock
) -> None:
    aws.types = [info("g5.xlarge", 4, 1)]
    make().instances("eu-west-1", ["g5"])
    clock.time += FRESH + 1
    aws.is_down = True
    assert make().instances("eu-west-1", ["g5"]).types["g5"][0].vcpus == 4
    aws.is_down = False
    aws.types = []  # taken out of the region
    assert make().instances("eu-west-1", ["g5"]).types == {}


# --- failures -------------------------------------------------------------------------------


def test_a_missing_permission_is_said_and_asked_about_once(aws: Aws, make: Make) -> None:
    aws.denied = {"GetProducts", "DescribeSpotPriceHistory"}
    items = ["nat-hour", "kms-key-month", "on-demand:g5.xlarge", "spot:g5.xlarge"]
    book = make().ask("eu-west-1", items)
    assert book.prices == {}
    assert book.unknown == {
        **dict.fromkeys(items[:3], "pricing:GetProducts is not allowed"),
        "spot:g5.xlarge": "ec2:DescribeSpotPriceHistory is not allowed",
    }
    assert sorted(aws.calls) == ["DescribeSpotPriceHistory", "GetProducts"]


def test_a_throttled_list_is_asked_once_and_named(aws: Aws, make: Make) -> None:
    aws.failure = (400, "ThrottlingException")
    book = make().ask("eu-west-1", ["nat-hour", "kms-key-month"])
    assert all("ThrottlingException" in why for why in book.unknown.values())
    assert len(book.unknown) == 2 and aws.calls == ["GetProducts"]


def test_one_question_that_is_refused_leaves_the_others(aws: Aws, make: Make) -> None:
    aws.failure = (400, "InvalidParameterException")
    make().ask("eu-west-1", ["nat-hour", "kms-key-month"])
    assert len(aws.calls) == 2


def test_without_an_answer_old_prices_do_and_their_date_is_said(
    aws: Aws, make: Make, clock: FakeClock
) -> None:
    aws.products = NETWORK
    make().ask("eu-west-1", ["nat-hour", "kms-key-month"])
    clock.time += FRESH + 1
    aws.is_down = True
    book = make().ask("eu-west-1", ["nat-hour", "logs-gb", "kms-key-month"])
    assert book.prices["nat-hour"].date == "2026-11-21"
    assert list(book.unknown) == ["logs-gb"]
    (note,) = book.notes
    assert note.startswith("Prices of 2026-11-21 are used: pricing:GetProducts")
    assert len(aws.calls) == 3  # two that were answered, one that was not
    aws.is_down = False
    assert make().ask("eu-west-1", ["nat-hour"]).prices["nat-hour"].date == "2026-11-28"


def test_what_was_answered_before_the_line_went_is_no_old_price(aws: Aws, make: Make) -> None:
    aws.products = NETWORK
    aws.down_after = 1
    book = make().ask("eu-west-1", ["nat-hour", "kms-key-month", "logs-gb"])
    assert (list(book.prices), book.notes) == (["nat-hour"], ())
    assert list(book.unknown) == ["kms-key-month", "logs-gb"]
    assert len(aws.calls) == 2
    aws.down_after = 99
    assert make().ask("eu-west-1", ["nat-hour"]).prices and len(aws.calls) == 2


# --- the cache ------------------------------------------------------------------------------


def test_prices_are_kept_for_seven_days_in_a_file_of_the_owner(
    aws: Aws, make: Make, clock: FakeClock, tmp_path: Path
) -> None:
    aws.products = NETWORK
    for seconds, calls in ((0, 1), (7 * DAY, 1), (1, 2), (-DAY, 3)):
        clock.time += seconds
        assert make().ask("eu-west-1", ["nat-hour", "gp3-gb-month"]).unknown == {}
        assert len(aws.calls) == calls, seconds
    path = tmp_path / "cache" / "prices.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["prices.json"]


def test_regions_are_kept_apart(aws: Aws, make: Make) -> None:
    aws.products = NETWORK
    make().ask("eu-west-1", ["nat-hour"])
    assert make().ask("us-east-1", ["nat-hour"]).prices == {}


LATER = json.dumps({
    "version": 2, "prices": {"eu-west-1/nat-hour": {
        "low": "7", "high": "7", "per": "hour", "asked": int(NOW), "since": "", "source": "",
    }},
}).encode()  # fmt: skip


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", LATER, b'{"prices": {"a": 1}}', b"null"]
)
def test_a_damaged_cache_is_no_cache(aws: Aws, make: Make, tmp_path: Path, content: bytes) -> None:
    aws.products = NETWORK
    path = tmp_path / "cache" / "prices.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert make().ask("eu-west-1", ["nat-hour"]).prices
    assert json.loads(path.read_bytes())["prices"]["eu-west-1/nat-hour"]["low"] == "0.048"


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_next_call(
    aws: Aws, clock: FakeClock, tmp_path: Path
) -> None:
    aws.products = NETWORK
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "prices.json", tmp_path / "folder"):
        assert Prices(aws, path, clock).ask("eu-west-1", ["nat-hour"]).prices
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_the_session_reaches_the_price_list_where_it_is() -> None:
    session = Session(Access(region="eu-west-1", access_key_id="k", secret_access_key="s"))
    assert session.client("pricing", region="us-east-1").meta.region_name == "us-east-1"
    assert session.client("pricing").meta.region_name == "eu-west-1"
