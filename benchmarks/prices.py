"""Prices of Amazon S3, in USD: S3 Standard in us-east-1, without discounts. DELETEs are free."""

from __future__ import annotations

AS_OF = "2024, aws.amazon.com/s3/pricing, not checked against today's list"
GET_PRICE, PUT_PRICE = 0.4e-6, 5e-6  # a request; HEADs as GETs, listings as PUTs
GB_MONTH_PRICE = 0.021  # of what exceeds 500 TB
