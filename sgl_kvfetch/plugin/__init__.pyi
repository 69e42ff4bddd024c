from .seams import SEAMS as SEAMS, SGLANG_VERSION as SGLANG_VERSION, Scope as Scope, check_seams as check_seams
