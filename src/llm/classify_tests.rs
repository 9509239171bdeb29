use proptest::prelude::*;

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
        let found = classify(*status, body);
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
        assert_eq!(classify(500, body).words, words);
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
        let found = classify(status, &body);
        prop_assert!(!found.words.contains('\n'));
        prop_assert!(found.words.chars().count() <= 301);
    }
}
