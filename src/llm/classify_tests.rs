use proptest::prelude::*;

use super::super::waits::{RateHint, duration_words, rate_hint, retry_after};
use super::ErrorClass::*;
use super::*;

#[expect(clippy::unnecessary_wraps, reason = "as it stands in the tables")]
fn seconds(seconds: f64) -> Option<Duration> {
    Some(Duration::from_secs_f64(seconds))
}

/// A row for each shape that is known of a server. Status, body, class, wait, parameter.
#[test]
fn servers_in_their_own_words() {
    type Expected = (u16, &'static str, ErrorClass, Option<Duration>, Option<&'static str>);
    let rows: &[Expected] = &[
        // OpenAI
        (
            429,
            r#"{"error":{"message":"Rate limit reached for gpt-4o in organization org-x on requests per min (RPM): Limit 3, Used 3. Please try again in 20s. Visit your account to add a payment method: billing.","type":"requests","param":null,"code":"rate_limit_exceeded"}}"#,
            RateLimited,
            seconds(20.0),
            None,
        ),
        (
            429,
            r#"{"error":{"message":"Rate limit reached on tokens per min (TPM): Limit 30000, Used 29000, Requested 2000. Please try again in 1.5s.","type":"tokens","code":"rate_limit_exceeded"}}"#,
            RateLimited,
            seconds(1.5),
            None,
        ),
        (
            429,
            r#"{"error":{"message":"Rate limit reached. Please try again in 850ms.","code":"rate_limit_exceeded"}}"#,
            RateLimited,
            seconds(0.85),
            None,
        ),
        (
            429,
            r#"{"error":{"message":"You exceeded your current quota, please check your plan and billing details.","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}"#,
            QuotaExhausted,
            None,
            None,
        ),
        (
            429,
            r#"{"error":{"message":"Limit","code":"billing_hard_limit_reached"}}"#,
            QuotaExhausted,
            None,
            None,
        ),
        (
            401,
            r#"{"error":{"message":"Incorrect API key provided: sk-…","code":"invalid_api_key"}}"#,
            Unauthorized,
            None,
            None,
        ),
        (
            403,
            r#"{"error":{"code":"unsupported_country_region_territory","message":"Country, region, or territory not supported"}}"#,
            Unauthorized,
            None,
            None,
        ),
        (
            404,
            r#"{"error":{"message":"The model `x` does not exist or you do not have access to it.","code":"model_not_found"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"This model's maximum context length is 8192 tokens. However, your messages resulted in 9120 tokens.","code":"context_length_exceeded"}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.","type":"invalid_request_error","param":"max_tokens","code":"unsupported_parameter"}}"#,
            UnsupportedParameter,
            None,
            Some("max_tokens"),
        ),
        (
            400,
            r#"{"error":{"message":"Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.","param":"temperature","code":"unsupported_value"}}"#,
            BadRequest,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model.","param":"response_format","code":null}}"#,
            UnsupportedParameter,
            None,
            Some("response_format"),
        ),
        (
            400,
            r#"{"error":{"message":"Unrecognized request argument supplied: logprobs","param":null,"code":null}}"#,
            UnsupportedParameter,
            None,
            Some("logprobs"),
        ),
        (
            400,
            r#"{"error":{"message":"Invalid prompt: your prompt was flagged as potentially violating our usage policy.","code":"invalid_prompt"}}"#,
            ContentFilter,
            None,
            None,
        ),
        (
            500,
            r#"{"error":{"message":"The server had an error while processing your request.","type":"server_error"}}"#,
            Server,
            None,
            None,
        ),
        (
            503,
            r#"{"error":{"message":"The engine is currently overloaded, please try again later","type":"server_error"}}"#,
            Server,
            None,
            None,
        ),
        // Azure
        (
            400,
            r#"{"error":{"code":"content_filter","message":"The response was filtered","status":400,"innererror":{"code":"ResponsibleAIPolicyViolation"}}}"#,
            ContentFilter,
            None,
            None,
        ),
        (
            404,
            r#"{"error":{"code":"DeploymentNotFound","message":"The API deployment for this resource does not exist."}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            429,
            r#"{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation have exceeded call rate limit of your current pricing tier. Please retry after 12 seconds."}}"#,
            RateLimited,
            seconds(12.0),
            None,
        ),
        (
            429,
            r#"{"statusCode":429,"message":"Rate limit is exceeded. Try again in 6 seconds."}"#,
            RateLimited,
            seconds(6.0),
            None,
        ),
        (
            401,
            r#"{"statusCode":401,"message":"Access denied due to invalid subscription key."}"#,
            Unauthorized,
            None,
            None,
        ),
        // Gemini's compatible endpoint
        (
            429,
            r#"[{"error":{"code":429,"message":"You exceeded your current quota, please check your plan and billing details.","status":"RESOURCE_EXHAUSTED","details":[{"violations":[{"quotaId":"GenerateRequestsPerMinutePerProjectPerModel-FreeTier"}]},{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"34.07s"}]}}]"#,
            RateLimited,
            seconds(34.07),
            None,
        ),
        (
            429,
            r#"[{"error":{"code":429,"message":"You exceeded your current quota.","status":"RESOURCE_EXHAUSTED","details":[{"violations":[{"quotaId":"GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]},{"retryDelay":"34s"}]}}]"#,
            QuotaExhausted,
            seconds(34.0),
            None,
        ),
        (
            429,
            r#"{"error":{"code":429,"message":"Resource exhausted. Please try again later.","status":"RESOURCE_EXHAUSTED"}}"#,
            RateLimited,
            None,
            None,
        ),
        (
            400,
            r#"[{"error":{"code":400,"message":"API key not valid. Please pass a valid API key.","status":"INVALID_ARGUMENT","details":[{"reason":"API_KEY_INVALID"}]}}]"#,
            Unauthorized,
            None,
            None,
        ),
        (
            400,
            r#"[{"error":{"code":400,"message":"The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).","status":"INVALID_ARGUMENT"}}]"#,
            ContextLength,
            None,
            None,
        ),
        (
            400,
            r#"[{"error":{"code":400,"message":"Invalid JSON payload received. Unknown name \"seed\": Cannot find field.","status":"INVALID_ARGUMENT"}}]"#,
            UnsupportedParameter,
            None,
            Some("seed"),
        ),
        (
            400,
            r#"[{"error":{"code":400,"message":"Multiple candidates is not enabled for this model","status":"INVALID_ARGUMENT"}}]"#,
            UnsupportedParameter,
            None,
            Some("n"),
        ),
        (
            404,
            r#"[{"error":{"code":404,"message":"models/x is not found for API version v1main","status":"NOT_FOUND"}}]"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            503,
            r#"[{"error":{"code":503,"message":"The model is overloaded. Please try again later.","status":"UNAVAILABLE"}}]"#,
            Server,
            None,
            None,
        ),
        // vLLM
        (
            400,
            r#"{"object":"error","message":"This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.","type":"BadRequestError","param":null,"code":400}"#,
            ContextLength,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"The decoder prompt (length 9000) is longer than the maximum model length of 8192.","type":"BadRequestError","code":400}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            404,
            r#"{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError","param":null,"code":404}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            400,
            r#"{"object":"error","message":"top_p must be in (0, 1], got 2.","code":400}"#,
            BadRequest,
            None,
            None,
        ),
        // llama.cpp
        (
            400,
            r#"{"error":{"code":400,"message":"the request exceeds the available context size, try increasing it","type":"exceed_context_size_error","n_prompt_tokens":9120,"n_ctx":8192}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            500,
            r#"{"error":{"code":500,"message":"context size exceeded","type":"server_error"}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            503,
            r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#,
            Server,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"code":400,"message":"Only one completion choice is allowed","type":"invalid_request_error"}}"#,
            UnsupportedParameter,
            None,
            Some("n"),
        ),
        (
            401,
            r#"{"error":{"code":401,"message":"Invalid API Key","type":"authentication_error"}}"#,
            Unauthorized,
            None,
            None,
        ),
        // Ollama
        (
            404,
            r#"{"error":{"message":"model 'x' not found, try pulling it first","type":"not_found_error"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            404,
            r#"{"error":"model \"x\" not found, try pulling it first"}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            400,
            r#"{"error":"prompt too long; exceeded max context length by 10 tokens"}"#,
            ContextLength,
            None,
            None,
        ),
        (
            500,
            r#"{"error":{"message":"llama runner process has terminated","type":"api_error"}}"#,
            Server,
            None,
            None,
        ),
        // Groq
        (
            429,
            r#"{"error":{"message":"Rate limit reached for model `x` on tokens per minute (TPM): Limit 6000. Please try again in 7.66s. Need more tokens? Upgrade to Dev Tier today at billing","type":"tokens","code":"rate_limit_exceeded"}}"#,
            RateLimited,
            seconds(7.66),
            None,
        ),
        (
            429,
            r#"{"error":{"message":"Rate limit reached for model `x` on tokens per day (TPD): Limit 100000. Please try again in 7m12.5s.","type":"tokens","code":"rate_limit_exceeded"}}"#,
            QuotaExhausted,
            seconds(432.5),
            None,
        ),
        (
            413,
            r#"{"error":{"message":"Request too large for model `x` on tokens per minute (TPM): Limit 6000, Requested 8000","type":"tokens","code":"rate_limit_exceeded"}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Please reduce the length of the messages or completion.","type":"invalid_request_error","code":"context_length_exceeded"}}"#,
            ContextLength,
            None,
            None,
        ),
        // OpenRouter
        (
            402,
            r#"{"error":{"code":402,"message":"Insufficient credits. Add more"}}"#,
            QuotaExhausted,
            None,
            None,
        ),
        (
            403,
            r#"{"error":{"code":403,"message":"openai/x requires moderation on OpenAI. Your input was flagged for \"violence\"","metadata":{"reasons":["violence"]}}}"#,
            ContentFilter,
            None,
            None,
        ),
        (
            429,
            r#"{"error":{"code":429,"message":"Rate limit exceeded: free-models-per-day. Add 10 credits"}}"#,
            QuotaExhausted,
            None,
            None,
        ),
        (
            429,
            r#"{"error":{"code":429,"message":"Rate limit exceeded: free-models-per-min."}}"#,
            RateLimited,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"code":400,"message":"x/y is not a valid model ID"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            404,
            r#"{"error":{"code":404,"message":"No endpoints found for x/y."}}"#,
            ModelNotFound,
            None,
            None,
        ),
        // Others
        (
            400,
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"prompt is too long: 210000 tokens > 200000 maximum"}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            529,
            r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
            Server,
            None,
            None,
        ),
        (
            400,
            r#"{"object":"error","message":"Prompt contains 40000 tokens, too large for model with 32768 maximum context length","type":"invalid_request_error"}"#,
            ContextLength,
            None,
            None,
        ),
        (
            422,
            r#"{"error":"Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000","error_type":"validation"}"#,
            ContextLength,
            None,
            None,
        ),
        (
            400,
            r#"{"message":"Input is too long for requested model."}"#,
            ContextLength,
            None,
            None,
        ),
        (422, r#"{"detail":[{"msg":"bad temperature"}]}"#, BadRequest, None, None),
        (
            422,
            r#"{"detail":[{"type":"extra_forbidden","loc":["body","logprobs"],"msg":"Extra inputs are not permitted"}]}"#,
            UnsupportedParameter,
            None,
            Some("logprobs"),
        ),
        (429, "slow down", RateLimited, None, None),
        (429, "", RateLimited, None, None),
        (404, "<html><body>Not Found</body></html>", WrongAddress, None, None),
        (403, "<html><h1>Forbidden</h1></html>", Unauthorized, None, None),
        (502, "<html><h1>502</h1> Bad\n Gateway</html>", Server, None, None),
        (301, "", WrongAddress, None, None),
        (408, "", Server, None, None),
        (418, "", BadRequest, None, None),
    ];
    for (status, body, class, wait, parameter) in rows {
        let found = classify(*status, body, None);
        assert_eq!(
            (found.class, found.wait, found.parameter.as_deref()),
            (*class, *wait, *parameter),
            "{status} {body}"
        );
    }
}

#[test]
fn words_on_one_line() {
    for (body, words) in [
        (r#"{"error":{"message":"Rate limit\n reached"}}"#, "Rate limit reached"),
        (r#"{"error":"bad key"}"#, "bad key"),
        (r#"{"detail":[{"msg":"bad temperature"}]}"#, "bad temperature"),
        (r#"[{"error":{"message":"no"}}]"#, "no"),
        (
            "<html><h1>503</h1> Service\n Unavailable</html>",
            "503 Service Unavailable",
        ),
    ] {
        assert_eq!(classify(500, body, None).words, words);
    }
}

#[test]
fn what_may_be_gone_later() {
    assert!(Server.passes() && Outage.passes() && !ContextLength.passes() && !Unauthorized.passes());
}

#[test]
fn waits_are_read_as_seconds_and_as_dates() {
    let now: jiff::Timestamp = "2026-11-30T12:00:00Z".parse().unwrap();
    assert_eq!(retry_after("2", now), Some(Duration::from_secs(2)));
    assert_eq!(retry_after("0.5", now), Some(Duration::from_millis(500)));
    assert_eq!(
        retry_after("Mon, 30 Nov 2026 12:00:30 GMT", now),
        Some(Duration::from_secs(30))
    );
    assert_eq!(retry_after("Mon, 30 Nov 2026 11:00:00 GMT", now), Some(Duration::ZERO));
    assert_eq!(retry_after("soon", now), None);
    assert_eq!(retry_after("-1", now), None);
    for (text, expected) in [
        ("6m0s", seconds(360.0)),
        ("20ms", seconds(0.02)),
        ("2h3m", seconds(7380.0)),
        ("34", seconds(34.0)),
        ("", None),
        ("soon", None),
        ("3x", None),
    ] {
        assert_eq!(duration_words(text), expected, "{text}");
    }
}

#[test]
fn limits_in_headers() {
    let now: jiff::Timestamp = "2026-11-30T12:00:00Z".parse().unwrap();
    let hint = |headers: &'static [(&'static str, &'static str)]| {
        rate_hint(
            |name| {
                headers
                    .iter()
                    .find(|(known, _)| *known == name)
                    .map(|(_, value)| *value)
            },
            now,
        )
    };
    assert_eq!(hint(&[]), RateHint::default());
    assert_eq!(
        hint(&[
            ("x-ratelimit-remaining-requests", "0"),
            ("x-ratelimit-reset-requests", "6m0s"),
            ("x-ratelimit-remaining-tokens", "149984"),
            ("x-ratelimit-reset-tokens", "20ms"),
        ]),
        RateHint {
            remaining_requests: Some(0),
            reset_requests: seconds(360.0),
            remaining_tokens: Some(149_984),
            reset_tokens: seconds(0.02),
            retry_after: None,
        }
    );
    let anthropic = hint(&[
        ("anthropic-ratelimit-requests-remaining", "0"),
        ("anthropic-ratelimit-requests-reset", "2026-11-30T12:00:30Z"),
        ("retry-after-ms", "250"),
        ("retry-after", "1"),
    ]);
    assert_eq!(
        (anthropic.reset_requests, anthropic.retry_after),
        (seconds(30.0), seconds(0.25))
    );
    // 2026-11-30T12:01:00Z in milliseconds.
    let openrouter = hint(&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1796040060000")]);
    assert_eq!(openrouter.reset_requests, seconds(60.0));
}

proptest! {
    #[test]
    fn any_body_has_a_class_and_a_line(status in 100_u16..=999, body in "\\PC{0,400}|(\\{\"error\":\\{\"message\":\"[a-zğ \\\\n]{0,500}\"\\}\\})") {
        let found = classify(status, &body, None);
        prop_assert!(!found.words.contains('\n'));
        prop_assert!(found.words.chars().count() <= 301);
    }
}

/// Shapes that were misread once: what the status and the first words suggest is not what they mean.
#[test]
fn servers_that_mislead() {
    type Expected = (u16, &'static str, ErrorClass, Option<Duration>, Option<&'static str>);
    let rows: &[Expected] = &[
        // Gemini, the quota of a minute without a wait and without details.
        (
            429,
            r#"{"error":{"code":429,"message":"You exceeded your current quota, please check your plan and billing details.","status":"RESOURCE_EXHAUSTED"}}"#,
            RateLimited,
            None,
            None,
        ),
        // One request larger than a minute's allowance never gets through.
        (
            429,
            r#"{"error":{"message":"Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 36278. The input or output tokens must be reduced in order to run successfully.","type":"tokens","code":"rate_limit_exceeded"}}"#,
            ContextLength,
            None,
            None,
        ),
        // Advice about days in the refusal of a minute.
        (
            429,
            r#"{"error":{"message":"Rate limit exceeded: free-models-per-min. Add 10 credits to unlock 1000 free model requests per day","code":429}}"#,
            RateLimited,
            None,
            None,
        ),
        (
            429,
            r#"{"error":{"code":"429","message":"You have exceeded the token rate limit of your pricing tier. Please retry after 86400 seconds."}}"#,
            QuotaExhausted,
            seconds(86400.0),
            None,
        ),
        (
            429,
            r#"{"code":"The service is currently at capacity","error":"Too many tokens for team t and model grok. Your rate limit is: Tokens per Minute (actual/limit): 65605/16000"}"#,
            RateLimited,
            None,
            None,
        ),
        (
            429,
            r#"{"object":"error","message":"Rate limit exceeded","type":"rate_limited","param":null,"code":"1300"}"#,
            RateLimited,
            None,
            None,
        ),
        (
            429,
            r#"{"error":{"message":"Your account t is suspended, please check your plan and billing details","type":"exceeded_current_quota_error"}}"#,
            QuotaExhausted,
            None,
            None,
        ),
        (
            429,
            r#"[{"error":{"code":429,"message":"Quota exceeded for metric: free_tier_requests, limit: 0, model: gemini-2.5-pro\nPlease retry in 34.07s.","status":"RESOURCE_EXHAUSTED"}}]"#,
            QuotaExhausted,
            seconds(34.07),
            None,
        ),
        (
            403,
            r#"{"error":{"message":"Key limit exceeded (daily limit)","code":403}}"#,
            QuotaExhausted,
            None,
            None,
        ),
        (
            403,
            r#"{"code":"The caller does not have permission","error":"Your newly created team doesn't have any credits yet."}"#,
            QuotaExhausted,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"code":"Arrearage","message":"Access denied, please make sure your account is in good standing."}}"#,
            QuotaExhausted,
            None,
            None,
        ),
        // A gateway wraps another's answer, as a string of JSON.
        (
            502,
            r#"{"error":{"message":"Provider returned error","code":502,"metadata":{"raw":"{\"error\":{\"message\":\"This model's maximum context length is 4096 tokens\"}}"}}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            422,
            r#"{"object":"error","message":"{\"detail\":[{\"type\":\"extra_forbidden\",\"loc\":[\"body\",\"seed\"],\"msg\":\"Extra inputs are not permitted\",\"input\":7}]}","type":"internal_error_proxy","code":"1000"}"#,
            UnsupportedParameter,
            None,
            Some("seed"),
        ),
        (
            200,
            r#"{"error":{"message":"Provider returned error","code":429}}"#,
            RateLimited,
            None,
            None,
        ),
        // What the body echoes of the prompt says nothing.
        (
            422,
            r#"{"detail":[{"type":"missing","loc":["body","messages"],"msg":"Field required","input":{"messages":"how many tokens per day; maximum context; json_schema is not supported"}}]}"#,
            BadRequest,
            None,
            None,
        ),
        (
            429,
            r#"{"error":{"message":"slow down","code":"rate_limit_exceeded"},"request":{"prompt":"sales per day"}}"#,
            RateLimited,
            None,
            None,
        ),
        (
            403,
            r#"{"error":{"message":"Your chosen model requires moderation and your input was flagged","code":403,"metadata":{"reasons":["violence"],"flagged_input":"..."}}}"#,
            ContentFilter,
            None,
            None,
        ),
        (
            403,
            r#"{"error":{"message":"Your account has been flagged for usage policy violations","code":"account_flagged"}}"#,
            Unauthorized,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Content Exists Risk","type":"invalid_request_error"}}"#,
            ContentFilter,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"code":400,"message":"User location is not supported for the API use.","status":"FAILED_PRECONDITION"}}"#,
            Unauthorized,
            None,
            None,
        ),
        (
            403,
            r#"{"error":{"message":"Project `p` does not have access to model `x`","code":"model_not_found"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Model Not Exist","type":"invalid_request_error"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            400,
            r#"{"object":"error","message":"Invalid model: x","type":"invalid_model","code":"1500"}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Unable to access non-serverless model x.","code":"model_not_available"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"The model `x` has been decommissioned and is no longer supported.","code":"model_decommissioned"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            503,
            r#"{"error":{"message":"No available channel for model x","code":"model_not_found"}}"#,
            ModelNotFound,
            None,
            None,
        ),
        (
            404,
            r#"{"error":{"message":"Invalid URL (POST /v1/models/chat/completions)","type":"invalid_request_error"}}"#,
            WrongAddress,
            None,
            None,
        ),
        (
            404,
            r#"{"error":{"code":"404","message":"Resource not found"}}"#,
            WrongAddress,
            None,
            None,
        ),
        (
            404,
            "<html><title>Shop</title><body>The model `A` of our bikes</body></html>",
            WrongAddress,
            None,
            None,
        ),
        (404, "404 page not found", WrongAddress, None, None),
        (404, r#"{"detail":"Not Found"}"#, WrongAddress, None, None),
        // Parameters.
        (
            400,
            r#"{"error":{"message":"Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.","code":"invalid_request_body"}}"#,
            UnsupportedParameter,
            None,
            Some("max_tokens"),
        ),
        (
            400,
            r#"{"error":{"code":400,"message":"Logprobs is not enabled for models/gemini-2.5-pro","status":"INVALID_ARGUMENT"}}"#,
            UnsupportedParameter,
            None,
            Some("logprobs"),
        ),
        (
            400,
            r#"{"error":{"message":"Unable to submit request because Logprobs is not supported for this model.","code":400}}"#,
            UnsupportedParameter,
            None,
            Some("logprobs"),
        ),
        (
            400,
            r#"{"error":{"message":"top_logprobs is not supported","param":"top_logprobs"}}"#,
            UnsupportedParameter,
            None,
            Some("logprobs"),
        ),
        (
            400,
            r#"{"error":{"message":"This model does not support response format `json_schema`.","type":"invalid_request_error"}}"#,
            UnsupportedParameter,
            None,
            Some("response_format"),
        ),
        (
            400,
            r#"{"error":{"message":"This response_format type is unavailable now"}}"#,
            UnsupportedParameter,
            None,
            Some("response_format"),
        ),
        (
            400,
            r#"{"error":"'response_format.type' must be 'json_schema' or 'text'"}"#,
            UnsupportedParameter,
            None,
            Some("response_format"),
        ),
        (
            400,
            r#"{"error":{"message":"'n' : number must be at most 1","type":"invalid_request_error"}}"#,
            UnsupportedParameter,
            None,
            Some("n"),
        ),
        (
            400,
            r#"{"error":{"message":"Invalid n value (currently only n = 1 is supported)"}}"#,
            UnsupportedParameter,
            None,
            Some("n"),
        ),
        (
            400,
            r#"{"object":"error","message":"[{'type': 'extra_forbidden', 'loc': ('body', 'logprobs'), 'msg': 'Extra inputs are not permitted'}]","type":"BadRequestError","code":400}"#,
            UnsupportedParameter,
            None,
            Some("logprobs"),
        ),
        (
            400,
            r#"{"error":{"message":"Invalid schema for response_format 'answer': 'minLength' is not permitted.","param":"response_format"}}"#,
            BadRequest,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"max_tokens is too large: 100000. This model supports at most 16384 completion tokens","param":"max_tokens"}}"#,
            BadRequest,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Invalid value for 'messages': this role is not supported","param":"messages"}}"#,
            BadRequest,
            None,
            None,
        ),
        // Too long.
        (
            400,
            r#"{"error":"Trying to keep the first 15857 tokens when context the overflows. However, the model is loaded with context length of only 4096 tokens"}"#,
            ContextLength,
            None,
            None,
        ),
        (
            500,
            r#"{"error":{"code":500,"message":"input is too large to process. increase the physical batch size","type":"server_error"}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Range of input length should be [1, 30720]","type":"invalid_request_error"}}"#,
            ContextLength,
            None,
            None,
        ),
        (
            413,
            "<html><h1>413 Request Entity Too Large</h1></html>",
            ContextLength,
            None,
            None,
        ),
        (
            400,
            r#"{"error":{"message":"Overloaded","type":"overloaded_error"}}"#,
            Server,
            None,
            None,
        ),
        (
            424,
            r#"{"error":"worker died","error_type":"generation"}"#,
            Server,
            None,
            None,
        ),
        (
            498,
            r#"{"error":{"message":"Flex tier capacity exceeded","code":"capacity_exceeded"}}"#,
            Server,
            None,
            None,
        ),
        (
            503,
            r#"{"error":"Model x is currently loading","estimated_time":20.0}"#,
            Server,
            None,
            None,
        ),
        // Waits.
        (
            429,
            "Please wait 10 seconds before trying again.",
            RateLimited,
            seconds(10.0),
            None,
        ),
        (429, "Try again in 6 minutes.", RateLimited, seconds(360.0), None),
        (
            429,
            "try again in 1m3.5s. 3 requests are left",
            RateLimited,
            seconds(63.5),
            None,
        ),
        (
            503,
            r#"{"error":{"message":"busy","metadata":{"retry_after_seconds":7}}}"#,
            Server,
            seconds(7.0),
            None,
        ),
        (
            429,
            r#"data: {"error":{"message":"Rate limit","code":"rate_limit_exceeded"}}"#,
            RateLimited,
            None,
            None,
        ),
    ];
    let wrong: Vec<String> = rows
        .iter()
        .filter_map(|(status, body, class, wait, parameter)| {
            let found = classify(*status, body, None);
            let right = (found.class, found.wait, found.parameter.as_deref()) == (*class, *wait, *parameter);
            (!right).then(|| {
                format!(
                    "{status} {body}\n    wanted {class:?} {wait:?} {parameter:?}\n    found  {:?} {:?} {:?}",
                    found.class, found.wait, found.parameter
                )
            })
        })
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        rows.len(),
        wrong.join("\n")
    );
}

#[test]
fn words_come_from_the_server_behind_a_gateway() {
    let body = r#"{"error":{"message":"Provider returned error","metadata":{"raw":"{\"error\":{\"message\":\"too\\u001b busy\\u2028now\"}}"}}}"#;
    assert_eq!(classify(502, body, None).words, "Provider returned error: too busy now");
    assert_eq!(
        classify(502, "<html><style>p{}</style><title>Bad gateway</title>…</html>", None).words,
        "Bad gateway"
    );
}

#[test]
fn huge_bodies_are_read_in_part() {
    for body in [
        "ş".repeat(3_000_000),
        "[".repeat(3_000_000),
        "<".repeat(3_000_000),
        format!(r#"{{"error":{{"message":"{}"}}}}"#, "a ".repeat(400_000)),
        "[".repeat(120) + &"]".repeat(120),
    ] {
        let words = classify(500, &body, None).words;
        assert!(words.chars().count() <= 301 && !words.contains('\n'));
    }
}

#[test]
fn classes_are_written_as_they_are_named() {
    for class in [
        UnsupportedParameter,
        Budget,
        NotCached,
        Outage,
        Interrupted,
        Stopped,
        RateLimited,
    ] {
        let text = serde_json::to_string(&class).unwrap();
        assert_eq!(text, format!("\"{}\"", class.name()));
        assert_eq!(serde_json::from_str::<ErrorClass>(&text).unwrap(), class);
    }
}

#[test]
fn odd_durations_and_headers() {
    for (text, expected) in [
        ("1.984999999s", seconds(1.984_999_999)),
        ("6 minutes", seconds(360.0)),
        ("1m 30s", seconds(90.0)),
        ("1.", None),
        ("1..2s", None),
        ("9e99", None),
        ("99999999999999999999d", Some(Duration::from_secs(1_000_000_000))),
    ] {
        assert_eq!(duration_words(text), expected, "{text}");
    }
    let now: jiff::Timestamp = "2026-11-30T12:00:00Z".parse().unwrap();
    let one = |name: &'static str, value: &'static str| rate_hint(move |asked| (asked == name).then_some(value), now);
    assert_eq!(one("x-ratelimit-reset", "1796040060").reset_requests, seconds(60.0));
    assert_eq!(
        one("x-ratelimit-reset", "1796000000").reset_requests,
        Some(Duration::ZERO)
    );
    assert_eq!(one("x-ratelimit-reset-tokens", "-1").reset_tokens, None);
    assert_eq!(one("x-ratelimit-remaining-tokens", "-3").remaining_tokens, Some(0));
    assert_eq!(one("x-ratelimit-remaining-tokens", "12.0").remaining_tokens, Some(12));
    assert_eq!(one("retry-after-ms", "nan").retry_after, None);
}

proptest! {
    #[test]
    fn any_text_is_survived(status in any::<u16>(), body in any::<String>(), wait in "[0-9a-zA-Zµ. :-]{0,40}") {
        let words = classify(status, &body, None).words;
        prop_assert!(words.chars().count() <= 301 && !words.chars().any(char::is_control));
        duration_words(&wait);
        classify(status, &format!(r#"{{"error":{{"message":"try again in {wait}","param":"{wait}"}}}}"#), None);
        rate_hint(|_| Some(wait.as_str()), jiff::Timestamp::MIN);
    }
}
